"""Markdown tables of the documentation, from the JSON in benchmarks/results.

`make tables` writes them into docs/ by means of docs/hooks/tables.py.
"""

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.harness import RESULTS
from fastgen.cli.bench.measure import agrees

MEGA = 2**20
SPACE = "\N{NO-BREAK SPACE}"
DIFFER, ROUNDED = "outputs differ", "differs within rounding"
MACHINES = {
    "cpu-zen5": f"Zen{SPACE}5",
    "cpu": f"Zen{SPACE}4",
    "cpu-avx2": f"Zen{SPACE}3",
    "cpu-intel": "Intel",
}
"""Names of the result folders' machines in the tables; other folders keep their own name."""
WHOLE_CALLS = ("generate", "best_batch", "text", "fairseq", "command")
NOT_YET, NONE = "There are no results yet.", "–"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    lines = [
        tuple(head),
        *(tuple(cell.replace("|", r"\|").replace("\n", " ") for cell in row) for row in rows),
    ]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machines() -> str:
    """Return the table of processors and GPUs with results, and the versions used."""
    used: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for name, data in _results():
        folder, place = name.partition("/")[0], data["environment"]
        device = place["gpu"] or f"{place['cpu'].partition(' (')[0]}, {place['threads']} threads"
        versions = used.setdefault(
            (_where(name), device, f"`{folder}/`"), {"transformers": set(), "torch": set()}
        )
        for package, seen in versions.items():
            seen.add(place[package].partition("+")[0])
    rows = [
        (*row, *(", ".join(sorted(seen)) for seen in versions.values()))
        for row, versions in used.items()
    ]
    return table(("in the tables", "machine", "results", "transformers", "PyTorch"), rows)


def headline() -> str:
    """Return the table of speed-ups of five whole calls, by processor."""
    cases = {
        "bart_large": "BART-large, 4 texts of 512 tokens, no repeated 3-gram",
        "gpt2": "GPT-2 124M, 4 prompts of 512 tokens",
        "marian_base": "Marian-base, 32 sentences of 32 tokens",
        "t5_base": "T5-base, 8 texts of 256 tokens",
        "fairseq_big": "fairseq's big transformer, 16 sentences of 40 tokens",
    }
    found = {name: data["result"] for name, data in _results(*WHOLE_CALLS)}
    # Cases that were only measured together with a third system.
    for name, data in _results("peer"):
        peer = data["arguments"]["peer"]
        ratio = data["result"]["over"]["stock"] | {"equal": agrees(data["result"])}
        found.setdefault(name.replace(f"_{peer}.json", ".json"), ratio)
    places = _places(found)
    rows = (
        (text, *(_times(found.get(f"{place}/{case}.json")) for place in places))
        for case, text in cases.items()
    )
    return table(("random weights at the real shapes", *map(_where, places)), rows)


def speed() -> str:
    """Return the table of whole calls of transformers, from all results files."""
    return _speed("generate", "best_batch", "text")


def fairseq_speed() -> str:
    """Return the table of whole calls of fairseq, from all results files."""
    return _speed("fairseq", "command")


def _speed(*kinds: str) -> str:
    """Return a table with a row per case and a column per machine.

    Cells hold the speed-up and the seconds of both sides.
    """
    found = dict(_results(*kinds))
    places = _places(found)
    cases: dict[str, str] = {}
    for name, data in found.items():
        cases.setdefault(name.partition("/")[2], data["help"])
    rows = [
        (
            f"{text} (`{case.removesuffix('.json')}`)",
            *(_cell(found.get(f"{place}/{case}")) for place in places),
        )
        for case, text in cases.items()
    ]
    return table(("case", *map(_where, places)), rows)


def _cell(data: dict[str, Any] | None) -> str:
    if data is None:
        return NONE
    result = data["result"]
    if not agrees(result):
        return DIFFER
    seconds = f"{result['baseline_seconds']:.3g} → {result['candidate_seconds']:.3g} s".replace(
        " ", SPACE
    )
    return (
        f"**{result['ratio']:.2f}** {_interval(result)}<br>{seconds}"
        f"{'' if result['equal'] else f'<br>{ROUNDED}'}"
    )


def peers() -> str:
    """Return the table of whole calls against another system with the same weights."""
    head = (
        "case",
        "machine",
        "peer",
        "seconds",
        "over transformers",
        "over the peer",
        "same texts",
    )
    names = {"ctranslate2": "CTranslate2", "compiled": "compiled"}
    rows: list[tuple[str, ...]] = []
    for file, data in _results("peer"):
        result, peer = data["result"], data["arguments"]["peer"]
        first = (f"`{data['case'].removeprefix('trained_')}`", _where(file), names[peer])
        if not agrees(result):
            rows.append((*first, *[""] * 3, DIFFER))
            continue
        seconds = ", ".join(f"{result['systems'][name]:.3g}" for name in ("stock", peer, "fastgen"))
        over = (_ratio(result["over"][name] | {"equal": True}) for name in ("stock", peer))
        same = result.get("same_texts", {}).get(peer)
        texts = (
            f"{same} of {result['sentences']}"
            if same is not None
            else "all tokens"
            if result["equal"]
            else ROUNDED
        )
        rows.append((*first, seconds, *over, texts))
    return table(head, rows)


def never_worse() -> str:
    """Return the table with the range of the grid's ratios, from all results files."""
    rows: list[tuple[str, ...]] = []
    for name, data in _results("grid"):
        if data["case"] != "never_worse":
            continue
        cells = data["result"]["cells"].values()
        ratios = [cell["ratio"] for cell in cells if cell["equal"]]
        rows.append(
            (
                _where(name),
                f"{len(ratios)} of {len(cells)}",
                f"{min(ratios):.2f}",
                f"{max(ratios):.2f}",
            )
        )
    return table(("machine", "calls with equal output", "lowest ratio", "highest ratio"), rows)


def few_tokens() -> str:
    """Return the table of ratios for few new tokens, from all results files."""
    # Ratios by (machine, sentences x beams) and by the number of new tokens.
    ratios_of: dict[tuple[str, str], dict[int, str]] = {}
    for name, data in _results("grid"):
        for cell in data["result"]["cells"].values() if data["case"] == "few_tokens" else ():
            row = ratios_of.setdefault((_where(name), f"{cell['batch']} x {cell['beams']}"), {})
            row[cell["new_tokens"]] = _ratio(cell)
    counts = sorted({count for row in ratios_of.values() for count in row})
    rows = [
        (*row, *(ratios.get(count, NONE) for count in counts)) for row, ratios in ratios_of.items()
    ]
    return (
        table(("machine", "sentences x beams", *(f"{n} new" for n in counts)), rows)
        if rows
        else NOT_YET
    )


def memory() -> str:
    """Return the table of measured KV cache sizes, from all results files."""
    rows = [
        (
            f"`{model}`",
            _where(name),
            f"{sides['stock']['measured'] / MEGA:.0f} MiB",
            f"{sides['fastgen']['measured'] / MEGA:.0f} MiB",
        )
        for name, data in _results("memory")
        for model, sides in data["result"]["models"].items()
    ]
    return table(("shape", "machine", "transformers", "fastgen"), rows)


def families_speed() -> str:
    """Return the tables of ratios of every family's calls, from all results files."""
    return _ratios("families", "family")


def encoders_speed() -> str:
    """Return the tables of ratios of encoders, from all results files.

    Columns are the lengths of the sentences in a batch.
    """
    return _ratios("forwards", "encoder")


def _ratios(kind: str, title: str) -> str:
    """Return a table of ratios per machine for one kind of results.

    Each has a row per model and a column per call.
    """
    parts: list[str] = []
    for file, data in _results(kind):
        models = data["result"]
        rows = ((f"`{name}`", *map(_ratio, calls.values())) for name, calls in models.items())
        parts += [f"On {_where(file)}:", table((title, *next(iter(models.values()))), rows)]
    return "\n\n".join(parts) or NOT_YET


def _ratio(found: dict[str, Any]) -> str:
    if not agrees(found):
        return DIFFER
    return f"{found['ratio']:.2f} {_interval(found)}{'' if found.get('hits', True) else ' aside'}"


def _times(result: dict[str, Any] | None) -> str:
    return NONE if result is None else f"{result['ratio']:.1f}" if agrees(result) else DIFFER


def _interval(found: dict[str, Any]) -> str:
    """Return a 95% interval that no line break divides."""
    return f"[{found['low']:.2f},{SPACE}{found['high']:.2f}]"


def paper() -> str:
    """Return the papers' tables and figures, as measured on each machine."""
    parts: list[str] = []
    for file in sorted(RESULTS.glob("*/paper/*.json")):
        data = json.loads(file.read_text("utf-8"))
        result = data["result"]
        what = data["what"][0].upper() + data["what"][1:]
        here = f"Here: {_device(data)}; {result['shape']}. The paper's: {data['paper_hardware']}."
        parts.append(f"## {data['title']}\n\n{textwrap.fill(f'{what}. {here}', 100)}")
        differ = "The outputs differed: no speed is given."
        parts.append(table(result["columns"], result["rows"]) if result["equal"] else differ)
        if result["curve"] is not None:
            parts.append(f"![{data['title']}](plots/{file.parts[-3]}-{data['case']}.svg)")
    return "\n\n".join(parts) or NOT_YET


def _results(*kinds: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results files of some kinds, ordered by machine.

    Args:
        kinds: kinds of results; all if empty.
    Yields:
        The path in benchmarks/results, and the data.
    """
    files = [str(file.relative_to(RESULTS)) for file in sorted(RESULTS.glob("*/*.json"))]
    for place in _places(files):
        for file in files:
            if file.startswith(f"{place}/"):
                data = json.loads((RESULTS / file).read_text("utf-8"))
                if not kinds or data["kind"] in kinds:
                    yield file, data


def _places(files: Iterable[str]) -> list[str]:
    """Return the folders of results files: those of MACHINES in its order, then all others."""
    folders = {file.partition("/")[0] for file in files}
    return [*(name for name in MACHINES if name in folders), *sorted(folders - set(MACHINES))]


def _where(file: str) -> str:
    """Return the name of the machine of a results file, or of its folder."""
    folder = file.partition("/")[0]
    return MACHINES.get(folder, folder)


def _device(data: dict[str, Any]) -> str:
    place = data["environment"]
    return place["gpu"] or f"{place['cpu']}, {place['threads']} threads"


TABLES: dict[str, Callable[[], str]] = {
    "encoders-speed": encoders_speed,
    "fairseq-speed": fairseq_speed,
    "families-speed": families_speed,
    "few-tokens": few_tokens,
    "headline": headline,
    "machines": machines,
    "memory": memory,
    "never-worse": never_worse,
    "paper": paper,
    "peers": peers,
    "speed": speed,
}
