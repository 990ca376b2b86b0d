"""Markdown tables of the documentation, from the JSON in benchmarks/results.

`make tables` writes them into docs/ by means of docs/hooks/tables.py.
"""

import json
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.cases import CASES
from benchmarks.coverage import record as coverage_record
from benchmarks.harness import RESULTS, ROOT
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
PEERS = {
    "ctranslate2": "CTranslate2",
    "compiled": "static cache, compiled",
    "openvino": "OpenVINO",
}
"""Names of the other systems in the tables."""
PLOTS = ROOT / "docs" / "plots"
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
    found = _comparisons("bart_large", "gpt2", "marian_base", "t5_base", "fairseq_big")
    return _summary(found, "random weights at the real shapes", digits=1)


def speed_summary() -> str:
    """Return the table of speed-ups over transformers, a row per case."""
    return _summary(_comparisons(*_cases("generate", "best_batch", "text")), "case")


def fairseq_summary() -> str:
    """Return the table of speed-ups over fairseq, a row per case."""
    return _summary(_comparisons(*_cases("fairseq", "command")), "case")


def _cases(*kinds: str) -> list[str]:
    """Return the names of the cases of some kinds that have results."""
    return list(dict.fromkeys(name.partition("/")[2][:-5] for name, _ in _results(*kinds)))


def _comparisons(*cases: str) -> dict[str, dict[str, Any]]:
    """Return the comparisons of some cases with the toolkit, by case and results folder."""
    found: dict[str, dict[str, Any]] = {case: {} for case in cases}
    for name, data in _results(*WHOLE_CALLS):
        folder, case = name[:-5].split("/")
        if case in found:
            found[case][folder] = data["result"]
    # Cases that were only measured together with a third system. With the trained models, the
    # toolkit takes longer beside one, so those count only without it.
    for name, data in _results("peer"):
        folder, case = name.removesuffix(f"_{data['arguments']['peer']}.json").split("/")
        if case in found and not case.startswith("trained"):
            ratio = data["result"]["over"]["stock"] | {"equal": agrees(data["result"])}
            found[case].setdefault(folder, ratio)
    return found


def _summary(found: dict[str, dict[str, Any]], title: str, digits: int = 2) -> str:
    """Return a table of ratios with a row per case and a column per machine."""
    places = _places(f"{folder}/" for folders in found.values() for folder in folders)
    rows = (
        (_title(case), *(_times(folders.get(place), digits) for place in places))
        for case, folders in found.items()
    )
    return table((title, *map(_where, places)), rows)


def _title(case: str) -> str:
    """Return what a case is, in words."""
    if case in CASES:
        return CASES[case].help
    of_dtype, _, dtype = case.rpartition("_")
    if dtype in ("bfloat16", "float16", "float64"):
        return f"{CASES[of_dtype].help}, {dtype}"
    name = case.removeprefix("trained_")
    return f"the trained model {name}, on real sentences"


def speed() -> str:
    """Return the table of whole calls of transformers, from all results files."""
    return _speed("generate", "best_batch", "text") + _plots("speed", "Speed-up over transformers")


def fairseq_speed() -> str:
    """Return the table of whole calls of fairseq, from all results files."""
    return _speed("fairseq", "command") + _plots("fairseq-speed", "Speed-up over fairseq")


def _speed(*kinds: str) -> str:
    """Return a table with a row per case and a column per machine.

    Cells hold the speed-up and the seconds of both sides.
    """
    found = dict(_results(*kinds))
    places = _places(found)
    rows = [
        (
            f"{_title(case)} (`{case}`)",
            *(_cell(found.get(f"{place}/{case}.json")) for place in places),
        )
        for case in _cases(*kinds)
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
        "compared with",
        "transformers, it, fastgen: seconds",
        "over transformers",
        "over it",
        "equal texts",
    )
    rows: list[tuple[str, ...]] = []
    for file, data in _results("peer"):
        result, peer = data["result"], data["arguments"]["peer"]
        first = (f"`{data['case'].removeprefix('trained_')}`", _where(file), PEERS[peer])
        if not agrees(result):
            rows.append((*first, *[""] * 3, DIFFER))
            continue
        seconds = ", ".join(f"{result['systems'][name]:.3g}" for name in ("stock", peer, "fastgen"))
        over = (_ratio(result["over"][name] | {"equal": True}) for name in ("stock", peer))
        same = result.get("same_texts", {}).get(peer)
        texts = (
            f"{same} of {result['sentences']}"
            if same is not None
            else "all"
            if result["equal"]
            else ROUNDED
        )
        rows.append((*first, seconds, *over, texts))
    return table(head, rows) + _plots("peer", "Seconds of the three systems")


def peers_summary() -> str:
    """Return the table of speed-ups over other systems, a row per case."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, data in _results("peer"):
        peer = data["arguments"]["peer"]
        ratio = data["result"]["over"][peer] | {"equal": agrees(data["result"])}
        found.setdefault((data["case"], PEERS[peer]), {})[name.partition("/")[0]] = ratio
    places = _places(f"{folder}/" for folders in found.values() for folder in folders)
    rows = (
        (_title(case), peer, *(_times(folders.get(place), 2) for place in places))
        for (case, peer), folders in found.items()
    )
    return table(("case", "compared with", *map(_where, places)), rows)


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


def grid_plots() -> str:
    """Return the plots of the grid's ratios of all machines."""
    return _plots("never-worse", "Ratio of every call of the grid").strip()


def few_tokens() -> str:
    """Return the table of ratios for few new tokens, from all results files."""
    return _few_tokens(
        lambda name, cell: (_where(name), f"{cell['batch']} x {cell['beams']}"),
        lambda cells: _ratio(cells[0]),
        "machine",
        "sentences x beams",
    )


def few_tokens_summary() -> str:
    """Return the table of the range of ratios for few new tokens, a row per machine."""
    return _few_tokens(
        lambda name, _: (_where(name),),
        lambda cells: _range([cell["ratio"] for cell in cells if agrees(cell)]),
        "machine",
    )


def _few_tokens(
    row_of: Callable[[str, dict[str, Any]], tuple[str, ...]],
    shown: Callable[[list[dict[str, Any]]], str],
    *titles: str,
) -> str:
    """Return a table with a column per number of new tokens.

    Args:
        row_of: maps a results file and a cell of the grid to the first columns of its row.
        shown: maps the cells of a row and column to the text of the table's cell.
        titles: titles of the first columns.
    """
    found: dict[tuple[str, ...], dict[int, list[dict[str, Any]]]] = {}
    for name, data in _results("grid"):
        for cell in data["result"]["cells"].values() if data["case"] == "few_tokens" else ():
            row = found.setdefault(row_of(name, cell), {})
            row.setdefault(cell["new_tokens"], []).append(cell)
    counts = sorted({count for row in found.values() for count in row})
    rows = [
        (*row, *(shown(cells[count]) if count in cells else NONE for count in counts))
        for row, cells in found.items()
    ]
    return table((*titles, *(f"{n} new" for n in counts)), rows) if rows else NOT_YET


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


def families_summary() -> str:
    """Return the table of the lowest, median and highest ratio of all families, a row per call."""
    rows: list[tuple[str, ...]] = []
    for file, data in _results("families"):
        models = data["result"].values()
        for call in next(iter(models), ()):
            ratios = [model[call]["ratio"] for model in models if agrees(model[call])]
            values = (min(ratios), statistics.median(ratios), max(ratios))
            rows.append((_setting(file, data), call, *(f"{value:.2f}" for value in values)))
    return table(("machine", "call", "lowest", "median", "highest"), rows)


def encoders_summary() -> str:
    """Return the table of ratios of encoders without their intervals."""
    return _ratios("forwards", "encoder", lambda cell: _times(cell, 2) if _runs(cell) else "–")


def families_speed() -> str:
    """Return the tables of ratios of every family's calls, from all results files."""
    return _ratios("families", "family")


def encoders_speed() -> str:
    """Return the tables of ratios of encoders, from all results files.

    Columns are the lengths of the sentences in a batch.
    """
    return _ratios("forwards", "encoder")


def _ratios(kind: str, title: str, shown: Callable[[dict[str, Any]], str] | None = None) -> str:
    """Return a table of ratios per machine for one kind of results.

    Each has a row per model and a column per call.
    """
    shown = shown or _ratio
    parts: list[str] = []
    for file, data in _results(kind):
        models = data["result"]
        rows = ((f"`{name}`", *map(shown, calls.values())) for name, calls in models.items())
        parts += [f"On {_setting(file, data)}:", table((title, *next(iter(models.values()))), rows)]
    return "\n\n".join(parts) or NOT_YET


def self_drafts() -> str:
    """Return the table of greedy search over a model's own drafts."""
    head = "model", "machine", "texts", "speed-up", "drafts that stand", "the passes allow"
    rows: list[tuple[str, ...]] = []
    for file, data in _results("self_draft"):
        given, result = data["arguments"], data["result"]
        model = f"{given['name']}, {result['bytes'] / MEGA:.0f} MiB, {given['dtype']}"
        for texts, cell in result["cells"].items():
            counts = cell["counts"]
            stand = counts["tokens_accepted"] / max(1, counts["tokens_drafted"])
            number = texts.removesuffix(" texts")
            facts = _ratio(cell), f"{stand:.0%}", f"{cell['allowed']:.2f}"
            rows.append((model, _where(file), number, *facts))
    return table(head, rows) if rows else NOT_YET


def int8_peers() -> str:
    """Return the table of fastgen in int8 against CTranslate2 in int8."""
    head = "model", "machine", "threads", "texts", "beams", "over it", "BLEU", "its BLEU"
    rows: list[tuple[str, ...]] = []
    for file, data in _results("int8_peer"):
        given = data["arguments"]
        for name, cell in data["result"]["cells"].items():
            texts, beams = (part.split(" ")[0] for part in name.split(", "))
            ratio = f"{cell['ratio']:.2f} {_interval(cell)}"
            bleu = (f"{cell['bleu'][system]:.2f}" for system in ("fastgen", "CTranslate2"))
            threads = str(given["threads"])
            rows.append((f"`{given['model']}`", _where(file), threads, texts, beams, ratio, *bleu))
    return table(head, rows) if rows else NOT_YET


def lossless() -> str:
    """Return the table of outputs that were compared with and without a model's own drafts."""
    head = "what", "calls or texts", "drafted tokens", "of them stand", "outputs that differ"
    counts: dict[str, dict[str, int]] = {}
    for _, data in _results("lossless"):
        for name, cell in data["result"].items():
            # Random calls of all families are one row.
            what = name.split(", ")[0] if name.startswith("random") else name
            total = counts.setdefault(what, dict.fromkeys((*cell, "texts"), 0))
            for key, value in cell.items():
                total["texts" if key == "calls" else key] += value
    rows = (
        (
            what,
            f"{cell['texts']:,}",
            f"{cell['tokens_drafted']:,}",
            f"{cell['tokens_accepted'] / max(1, cell['tokens_drafted']):.0%}",
            f"{cell['differing']}",
        )
        for what, cell in counts.items()
    )
    return table(head, rows) if counts else NOT_YET


def _ratio(found: dict[str, Any]) -> str:
    if not agrees(found):
        return DIFFER
    return f"{found['ratio']:.2f} {_interval(found)}{'' if _runs(found) else ' (declined)'}"


def _runs(cell: dict[str, Any]) -> bool:
    """Return whether fastgen accelerated a call."""
    return bool(cell.get("hits", True))


def _times(result: dict[str, Any] | None, digits: int) -> str:
    if result is None:
        return NONE
    return f"{result['ratio']:.{digits}f}" if agrees(result) else DIFFER


def _range(ratios: list[float]) -> str:
    """Return the lowest and highest of some ratios."""
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _plots(name: str, title: str) -> str:
    """Return the plots of one kind of all machines, each in a paragraph after an empty line."""
    plots = {
        file.name.removesuffix(f"-{name}.svg"): file.name for file in PLOTS.glob(f"*-{name}.svg")
    }
    # A name may end like another one: cpu-fairseq-speed.svg is no plot of the kind speed.
    places = [place for place in plots if (RESULTS / place).is_dir()]
    return "".join(
        f"\n\n![{title}, {_where(place)}](plots/{plots[place]})"
        for place in _places(f"{place}/" for place in places)
    )


def _interval(found: dict[str, Any]) -> str:
    """Return a 95% interval that no line break divides."""
    return f"[{found['low']:.2f},{SPACE}{found['high']:.2f}]"


def _with_interval(found: dict[str, Any]) -> str:
    return f"{found['ratio']:.2f}{SPACE}{_interval(found)}"


def paper() -> str:
    """Return the papers' tables and figures, as measured on each machine."""
    parts: list[str] = []
    for file in sorted(RESULTS.glob("*/paper/*.json")):
        data = json.loads(file.read_text("utf-8"))
        result = data["result"]
        what = data["what"][0].upper() + data["what"][1:]
        facts = (f"Here: {_device(data)}; {result['shape']}", f"Paper: {data['paper_hardware']}")
        lines = [_filled(f"- {fact}.", "  ") for fact in facts]
        parts.append("\n\n".join((f"## {data['title']}", _filled(f"{what}."), "\n".join(lines))))
        differ = "The outputs differed: no speed is given."
        parts.append(table(result["columns"], result["rows"]) if result["equal"] else differ)
        if result["curve"] is not None:
            parts.append(f"![{data['title']}](plots/{file.parts[-3]}-{data['case']}.svg)")
    return "\n\n".join(parts) or NOT_YET


def _filled(text: str, indent: str = "") -> str:
    """Return a text in lines of at most 100 columns, all but the first with an indent."""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_on_hyphens=False)


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


def _setting(file: str, data: dict[str, Any]) -> str:
    """Return the name of the machine of a results file, with the dtype if it is not fp32."""
    dtype = data["arguments"].get("dtype", "float32")
    return _where(file) if dtype == "float32" else f"{_where(file)}, {dtype}"


def _device(data: dict[str, Any]) -> str:
    place = data["environment"]
    return place["gpu"] or f"{place['cpu']}, {place['threads']} threads"


def many_requests() -> str:
    """Return the table of many requests, a row per cell."""
    arms = ("padded", "stock")
    rows = [
        (_where(name), cell, *(_with_interval(one[arm]) if arm in one else NONE for arm in arms))
        for name, data in _results("many_requests")
        for cell, found in data["result"]["cells"].items()
        for one in [found.get("over", {})]
    ]
    return table(("machine", "requests", *arms), rows) if rows else NOT_YET


def load() -> str:
    """Return the table of requests that arrive at random, a row per arm and rate."""
    rows = [
        (
            one["arm"],
            cell.removeprefix(f"{one['arm']}, ").removesuffix(" of capacity"),
            f"{one['tokens_per_second']:.0f}",
            f"{one['p50']:.1f}",
            f"{one['p95']:.1f}",
            str(one["refused"]),
        )
        for _, data in _results("load")
        for cell, one in data["result"]["cells"].items()
        if "p50" in one
    ]
    head = ("arm", "requests arrive", "tokens/s", "p50, s", "p95, s", "answered with 503")
    return table(head, rows) if rows else NOT_YET


def coverage() -> str:
    """Return how many families of transformers run in which way, and the table of all."""
    if not coverage_record.FILE.exists():
        return NOT_YET
    data = json.loads(coverage_record.FILE.read_text("utf-8"))
    found: dict[str, dict[str, Any]] = data["families"]
    head = ["`model_type`", "how it runs", "why not better, or not at all"]
    timed = any("speed" in family for family in found.values())
    rows = (
        (
            f"`{name}`",
            family["how"],
            "; ".join(_why(*item) for item in family["why"].items()),
            *([_times(family.get("speed"), 2)] if timed else []),
        )
        for name, family in found.items()
    )
    summary = (
        f"transformers {data['transformers']}, {len(found)} families: "
        f"{coverage_record.counted(found)}."
    )
    return "\n\n".join(
        (textwrap.fill(summary, 100), table([*head, *(["speed"] if timed else [])], rows))
    )


def _why(reason: str, calls: list[str]) -> str:
    """Return a reason, with the calls that it is for if other calls have none."""
    reason = reason.replace("<", "&lt;")
    return f"{reason} ({'; '.join(calls)})" if 0 < len(calls) < coverage_record.CALLS else reason


TABLES: dict[str, Callable[[], str]] = {
    "coverage": coverage,
    "encoders-speed": encoders_speed,
    "encoders-summary": encoders_summary,
    "fairseq-speed": fairseq_speed,
    "fairseq-summary": fairseq_summary,
    "families-speed": families_speed,
    "families-summary": families_summary,
    "few-tokens": few_tokens,
    "few-tokens-summary": few_tokens_summary,
    "grid-plots": grid_plots,
    "headline": headline,
    "int8-peers": int8_peers,
    "load": load,
    "lossless": lossless,
    "machines": machines,
    "many-requests": many_requests,
    "memory": memory,
    "never-worse": never_worse,
    "paper": paper,
    "peers": peers,
    "peers-summary": peers_summary,
    "self-drafts": self_drafts,
    "speed": speed,
    "speed-summary": speed_summary,
}
