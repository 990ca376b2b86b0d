"""`fairseq-generate`, with output built and scored in the background during translation.

The output is fairseq's, in the same order. A results file gets its final name once it is complete.
"""

import errno
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from fairseq import checkpoint_utils, scoring, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import progress_bar
from fairseq.logging.meters import StopwatchMeter, TimeMeter

from fastgen.patches.engine import engine
from fastgen.patches.fairseq.bild.bild_command import Pair
from fastgen.patches.fairseq.commands import workers
from fastgen.patches.fairseq.commands.background import InOrder
from fastgen.patches.fairseq.commands.lines import LineFormatter, Scored, Sentence, plain_hypotheses
from fastgen.patches.fairseq.commands.options import command_line
from fastgen.patches.fairseq.commands.setup import Run, check_sampling, standard_output, without
from fastgen.patches.fairseq.generator.refill import Translations

_Original = Callable[..., Any]
_Translate = Callable[[Iterable[Any], StopwatchMeter], Iterator["_ReadOff"]]


def generate(original: _Original, cfg: Any) -> Any:
    """`fairseq_cli.generate.main`: check the options, then run with output to the right file."""
    if isinstance(cfg, Namespace):
        cfg = convert_namespace_to_omegaconf(cfg)
    pair = Pair(cfg, "fairseq-generate")
    if cfg.generation.print_step or cfg.generation.retain_iter_history:
        if command_line.generate_workers not in (None, 1):
            raise SystemExit(
                f"fairseq-generate: --generate-workers {command_line.generate_workers} is not "
                "possible: the steps of iterative refinement are printed"
            )
        engine.fallback("fairseq.generate_command", "the steps of iterative refinement are printed")
        return original(cfg)
    _check(cfg)
    with engine.running("fairseq-generate"), _output(cfg) as output:
        scorer, left_off = _generate(cfg, output, pair)
    engine.hit("fairseq.generate_command", left_off)
    return scorer


def _check(cfg: Any) -> None:
    assert cfg.common_eval.path is not None, "--path required for generation!"
    check_sampling(cfg)
    assert cfg.generation.replace_unk is None or cfg.dataset.dataset_impl == "raw", (
        "--replace-unk requires a raw text dataset (--dataset-impl=raw)"
    )


@contextmanager
def _output(cfg: Any) -> Iterator[TextIO | None]:
    """Yield the output: standard output, None if there is none, or a file.

    A file has a temporary name until it is complete.

    Raises:
        SystemExit: The output cannot be written; the message says why.
    """
    if cfg.common_eval.results_path is None:
        with standard_output("fairseq-generate") as output:
            yield output
        return
    folder = Path(cfg.common_eval.results_path)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"generate-{cfg.dataset.gen_subset}.txt"
    partial = file.with_suffix(".txt.partial")
    try:
        with partial.open("w", encoding="utf-8") as output:
            yield output
        partial.replace(file)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename not in (None, str(partial)):
            raise
        raise SystemExit(f"fairseq-generate: {partial} is not whole: {error.strerror}") from error


def _generate(cfg: Any, output: TextIO | None, pair: Pair) -> tuple[Any, Iterable[str]]:
    """Translate a data set; return the scorer, and the disabled features."""
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=os.environ.get("LOGLEVEL", "INFO").upper(),
        stream=output,
    )
    logger = logging.getLogger("fairseq_cli.generate")
    utils.import_user_module(cfg.common)
    if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
        cfg.dataset.max_tokens = 12000
    run = Run(cfg, logger, pair)
    run.task.load_dataset(cfg.dataset.gen_subset, task_cfg=run.saved.task)
    dataset = run.task.dataset(cfg.dataset.gen_subset)
    language_model = _language_model(run, logger)
    run.prepare([*run.models, *([] if language_model is None else [language_model])])
    batches = _batches(run, dataset)
    extra = {"lm_model": language_model, "lm_weight": cfg.generation.lm_weight}
    generator = run.task.build_generator(run.models, cfg.generation, extra_gen_cls_kwargs=extra)
    try:
        source_dictionary = getattr(run.task, "source_dictionary", None)
    except NotImplementedError:
        source_dictionary = None
    formatter = run.formatter(generator, source_dictionary, interactive=False)
    scorer: Any = scoring.build_scorer(cfg.scoring, run.task.target_dictionary)
    timer, meter, count, has_target = StopwatchMeter(), TimeMeter(), 0, True

    def write(result: tuple[str, list[Scored]]) -> None:
        text, scored = result
        print(text, end="", file=output)
        for sentence in scored:
            if hasattr(scorer, "add_string"):
                scorer.add_string(sentence.target, sentence.hypothesis)
            else:
                scorer.add(
                    torch.IntTensor(sentence.target_tokens),
                    torch.IntTensor(sentence.hypothesis_tokens),
                )

    def read_off(batches: Iterable[Any], timer: StopwatchMeter) -> Iterator[_ReadOff]:
        """Translate batches, in this process or in a worker."""
        prefix_size = cfg.generation.prefix_size
        translations = Translations(
            run.task, run.models, generator, batches, timer, prefix_size, run.cuda
        )
        for sample, hypotheses, tokens in translations:
            read: Any = (
                None if hypotheses is None else _sentences(sample, hypotheses, formatter, dataset)
            )
            count = (
                sample["nsentences"]
                if "nsentences" in sample
                else 0
                if read is None
                else sample["id"].numel()
            )
            yield _ReadOff(
                read, count, tokens, sample.get("target") is not None, tuple(translations.left_off)
            )

    with (
        pair.drafting(generator) as drafting,
        _by_workers(run, generator, language_model, batches, read_off, timer) as (
            translated,
            left_off,
        ),
        InOrder(formatter.batch, write, command_line.postprocess_workers) as background,
    ):
        progress = _under_bar(run, translated, len(batches))
        for read in progress:
            left_off.update(dict.fromkeys(read.left_off))
            if read.sentences is None:
                continue
            has_target = read.has_target
            background.hand_in(read.sentences)
            meter.update(read.tokens)
            progress.log({"wps": round(meter.avg)})
            count += read.count
    logger.info("NOTE: hypothesis and token scores are output in base 2")
    logger.info(
        f"Translated {count:,} sentences ({timer.n:,} tokens) in {timer.sum:.1f}s "
        f"({count / timer.sum:.2f} sentences/s, {1.0 / timer.avg:.2f} tokens/s)"
    )
    if drafting is not None:
        logger.info(drafting)
    if has_target:
        _warn_of_bleu(cfg, logger)
        subset, beam = cfg.dataset.gen_subset, cfg.generation.beam
        print(f"Generate {subset} with beam={beam}: {scorer.result_string()}", file=output)
    return scorer, left_off


@dataclass(frozen=True)
class _ReadOff:
    """A batch and its translations as plain numbers.

    Attributes:
        sentences: The sentences; None if the batch has none.
        count: Number of sentences.
        tokens: Total length of the best hypotheses.
        has_target: Whether the batch has references.
        left_off: Disabled features so far, with their fallback reasons.
    """

    sentences: list[Sentence] | None
    count: int
    tokens: int
    has_target: bool
    left_off: tuple[str, ...]


class _Sized(NamedTuple):
    """An iterable with a known length, for the progress bar."""

    iterator: Iterable[Any]
    length: int

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterator)

    def __len__(self) -> int:
        return self.length


@contextmanager
def _by_workers(
    run: Run,
    generator: Any,
    language_model: Any,
    batches: Any,
    read_off: _Translate,
    timer: StopwatchMeter,
) -> Iterator[tuple[Iterable[_ReadOff], dict[str, None]]]:
    """Yield the translated batches, and the features disabled because one process translates.

    It uses the requested number of processes, or the fastest one.

    Raises:
        SystemExit: Several processes are requested and not possible.
    """
    models = [*run.models, *([] if language_model is None else [language_model])]
    number = workers.chosen(
        "fairseq-generate", command_line.generate_workers, len(batches), run.task, generator, models
    )  # fmt: skip
    if isinstance(number, str) or number == 1:
        yield (
            read_off(batches, timer),
            {} if number == 1 else {f"one process translates: {number}": None},
        )
        return
    with workers.Workers(lambda handed: read_off(handed, StopwatchMeter()), number) as pool:
        yield _timed(pool.results(batches), timer), {}


def _timed(translated: Iterable[_ReadOff], timer: StopwatchMeter) -> Iterator[_ReadOff]:
    """Run the timer while workers translate, and count the tokens."""
    tokens = 0
    timer.start()
    for read in translated:
        tokens += read.tokens
        yield read
    timer.stop(tokens)


def _language_model(run: Run, logger: logging.Logger) -> Any:
    path = run.cfg.generation.lm_path
    if path is None:
        return None
    run.overrides["data"] = run.cfg.task.data
    try:
        models, _ = checkpoint_utils.load_model_ensemble(
            [path], arg_overrides=run.overrides, task=None
        )
    except Exception:
        logger.warning(
            "Failed to load language model! Please make sure that the language model dict is the "
            f"same as target dict and is located in the data dir ({run.cfg.task.data})"
        )
        raise
    assert len(models) == 1
    return models[0]


def _batches(run: Run, dataset: Any) -> Any:
    """Return the batches, which fairseq's data loader workers collate ahead."""
    cfg = run.cfg
    return run.task.get_batch_iterator(
        dataset=dataset,
        max_tokens=cfg.dataset.max_tokens,
        max_sentences=cfg.dataset.batch_size,
        max_positions=run.max_positions(),
        ignore_invalid_inputs=cfg.dataset.skip_invalid_size_inputs_valid_test,
        required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
        seed=cfg.common.seed,
        num_shards=cfg.distributed_training.distributed_world_size,
        shard_id=cfg.distributed_training.distributed_rank,
        num_workers=cfg.dataset.num_workers,
        data_buffer_size=cfg.dataset.data_buffer_size,
    ).next_epoch_itr(shuffle=False)


def _under_bar(run: Run, translated: Iterable[_ReadOff], batches: int) -> Any:
    """Show fairseq's progress bar over finished translations."""
    cfg = run.cfg
    return progress_bar.progress_bar(
        _Sized(translated, batches),
        log_format=cfg.common.log_format,
        log_interval=cfg.common.log_interval,
        default_log_format="simple" if cfg.common.no_progress_bar else "tqdm",
    )


def _sentences(
    sample: Any, found: list[Any], formatter: LineFormatter, dataset: Any
) -> list[Sentence]:
    """Convert a batch and its translations to plain numbers."""
    pad = formatter.target_dictionary.pad()
    sources, targets = (
        None if tokens is None else [without(row, pad) for row in tokens.tolist()]
        for tokens in (sample["net_input"].get("src_tokens"), sample["target"])
    )
    sentences: list[Sentence] = []
    for i, number in enumerate(sample["id"].tolist()):
        source: Any = None if sources is None else sources[i]
        target: Any = None if targets is None else targets[i]
        if formatter.align is not None:
            source = dataset.src.get_original_text(number)
            target = dataset.tgt.get_original_text(number)
        sentences.append(
            Sentence(number, source, target, plain_hypotheses(found[i][: formatter.nbest]))
        )
    return sentences


def _warn_of_bleu(cfg: Any, logger: logging.Logger) -> None:
    if not cfg.bpe or cfg.generation.sacrebleu:
        return
    if cfg.common_eval.post_process:
        logger.warning(
            "BLEU score is being computed by splitting detokenized string on spaces, this is "
            "probably not what you want. Use --sacrebleu for standard 13a BLEU tokenization"
        )
    else:
        logger.warning(
            "If you are using BPE on the target side, the BLEU score is computed on BPE tokens, "
            "not on proper words.  Use --sacrebleu for standard 13a BLEU tokenization"
        )
