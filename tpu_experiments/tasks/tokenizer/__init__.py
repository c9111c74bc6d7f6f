"""task=tokenizer: train a tokenizer on the training documents of `data=`, and measure it on held-out ones.

<folder>/tokenizer.json, tokenizer_config.json   what transformers' AutoTokenizer and model.tokenizer_path= load
         measures.json, report.html              the measures, with those of task.compare_with
         training.json                           what it was made from; written last

The command, repeated, leaves a complete tokenizer as it is.
"""

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.escaping import for_terminal
from tpu_experiments.config.schema import Config
from tpu_experiments.config.task_schema import TokenizerTaskConfig
from tpu_experiments.data.steps.workers import start_server
from tpu_experiments.data.texts import SourceTexts, cleaned_texts, drawn
from tpu_experiments.data.tokens.tokenizer import load_tokenizer
from tpu_experiments.loggers.runlog import terminal_log
from tpu_experiments.storage import paths, strict_json
from tpu_experiments.storage.retry import explain_storage_errors
from tpu_experiments.tasks.tokenizer.measures import HARD_LINES, Measures, as_table, encoded, measured
from tpu_experiments.tasks.tokenizer.page import tokenizer_page
from tpu_experiments.tasks.tokenizer.training import trained
from tpu_experiments.training.batches import own_readers, prepared_folder

log = logging.getLogger(__name__)
MARKER, BEGUN, MEASURES, PAGE = "training.json", "training_begun.json", "measures.json", "report.html"
NOT_OF_THE_TOKENIZER = ("compare_with", "held_out_bytes", "folder", "name")
"""Settings that do not decide the tokenizer."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Documents that are used, a mask (D,) of each source."""

    sources: list[SourceTexts]
    chosen: list[NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """Return the UTF-8 bytes of the texts."""
        return sum(int(s.bytes_D[chosen].sum()) for s, chosen in zip(self.sources, self.chosen, strict=True))

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return sum(int(chosen.sum()) for chosen in self.chosen)

    def texts(self) -> Iterator[str]:
        """Yield all texts, source by source."""
        for source, chosen in zip(self.sources, self.chosen, strict=True):
            yield from source.texts(chosen)

    def digest(self) -> str:
        """Return a hash of the documents in order."""
        digest = hashlib.sha256()
        for source, chosen in zip(self.sources, self.chosen, strict=True):
            digest.update(f"{source.name} {source.key} ".encode() + source.hash_D[chosen].tobytes())
        return digest.hexdigest()[:16]


def run(config: Config) -> None:
    """Train, measure and print the table, unless the folder has this tokenizer.

    Raises:
        ConfigError: something the user can fix.
    """
    task = config.task
    assert isinstance(task, TokenizerTaskConfig), "conf/task/tokenizer.yaml has this schema"
    folder = task.folder or paths.join(config.output_dir, "tokenizers", str(config.name))
    with terminal_log(), explain_storage_errors(folder, full="failed"):
        found = tokenizer_of(config, task, folder)
    print(for_terminal(as_table(found)))
    print(f"tokenizer: {folder}\nreport: {paths.join(folder, PAGE)}")


def tokenizer_of(config: Config, task: TokenizerTaskConfig, folder: str) -> list[Measures]:
    """Train the tokenizer of a config, or find it in its folder; return its measures and the other's.

    Raises:
        ConfigError: no documents to train on or to measure, or another tokenizer or other files in the folder.
    """
    advice = "name another place with task.folder= or name="
    paths.require_own(folder, marker=MARKER, begun=BEGUN, advice=advice)
    other = _other(config, task)
    if config.prepare.engine == "local" and config.prepare.workers != 1:
        start_server()
    sources = cleaned_texts(
        config.data,
        data_size=config.data_size,
        settings=config.prepare,
        folder=prepared_folder(config),
        readers=own_readers(config),
    )
    training, held_out = (
        Drawn(sources, drawn(sources, splits=splits, max_bytes=limit, seed=config.seed))
        for splits, limit in ((("train",), task.max_bytes), (("evaluation", "test"), task.held_out_bytes))
    )
    _require_documents(training, held_out, config=config)
    facts = _facts(config, task, training)
    of_measures = {"held_out": held_out.digest(), "compare_with": task.compare_with}
    measures_file = paths.join(folder, MEASURES)
    if _complete(folder, facts):
        log.info("%s has this tokenizer", folder)
        known = strict_json.loads(paths.read_bytes(measures_file)) if paths.exists(measures_file) else {}
        if known.get("of") == of_measures:
            return [Measures.of(fields) for fields in known["tokenizers"]]
        tokenizer = _loaded(folder)
    else:
        log.info("%d documents, %.1f MB of text; training", training.num_documents, training.num_bytes / 1e6)
        tokenizer = _written(config, task, folder, training)
    found = [measured(tokenizer, held_out.texts(), name=str(config.name))]
    if other is not None:
        found.append(measured(other, held_out.texts(), name=str(task.compare_with)))
    shown = {name: value for name, value in facts.items() if value not in (None, {}, [])}
    paths.write_text_atomic(paths.join(folder, PAGE), tokenizer_page(found, title=str(config.name), facts=shown))
    content = {"of": of_measures, "tokenizers": [each.fields() for each in found]}
    paths.write_text_atomic(measures_file, strict_json.dumps(content, indent=1) + "\n")
    paths.write_text_atomic(paths.join(folder, MARKER), strict_json.dumps(facts, indent=1) + "\n")
    paths.remove_tree(paths.join(folder, BEGUN))
    return found


def _facts(config: Config, task: TokenizerTaskConfig, training: Drawn) -> dict[str, Any]:
    """Return everything that decides the tokenizer's bytes."""
    import tokenizers
    import transformers

    settings = {name: value for name, value in asdict(task).items() if name not in NOT_OF_THE_TOKENIZER}
    return {
        **settings,
        "data": list(config.data),
        "documents": training.num_documents,
        "bytes": training.num_bytes,
        "digest": training.digest(),
        "seed": config.seed,
        "chat_format": config.model.chat_format,
        "chat_template_path": config.model.chat_template_path,
        "tokenizers": tokenizers.__version__,
        "transformers": transformers.__version__,
    }


def _complete(folder: str, facts: dict[str, Any]) -> bool:
    """Return whether the folder has this tokenizer.

    Raises:
        ConfigError: it has another one.
    """
    file = paths.join(folder, MARKER)
    if not paths.exists(file):
        return False
    known = strict_json.loads(paths.read_bytes(file))
    differing = [name for name in dict.fromkeys((*known, *facts)) if known.get(name) != facts.get(name)]
    if differing:
        shown = ", ".join(f"{name} {known.get(name)} (here {facts.get(name)})" for name in differing[:3])
        raise ConfigError(
            f"{folder}; it holds another tokenizer: {shown}; nothing is written over; name another place with "
            "task.folder= or name=."
        )
    return True


def _require_documents(training: Drawn, held_out: Drawn, *, config: Config) -> None:
    """Require text to train on and to measure.

    Raises:
        ConfigError: there is none.
    """
    for documents, what, remedy in (
        (training, "train on", "lower data.<name>.eval_fraction and test_fraction, or loosen data.<name>.clean"),
        (held_out, "measure on", "raise data.<name>.eval_fraction, or name data.<name>.eval_path="),
    ):
        if not documents.num_bytes:
            total = sum(len(source.code_D) for source in documents.sources)
            raise ConfigError(
                f"data=[{','.join(config.data)}]; of {total} documents none is left to {what}; {remedy}, or add "
                "documents."
            )


def _other(config: Config, task: TokenizerTaskConfig) -> PreTrainedTokenizerBase | None:
    """Load `task.compare_with` before anything is trained."""
    if task.compare_with is None:
        return None
    return load_tokenizer(
        task.compare_with,
        revision=None,
        chat_template_path=None,
        remote_code=config.model.remote_code,
        key="task.compare_with",
    )


def _loaded(folder: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a complete folder, local or remote."""
    with paths.local_copy(folder) as local:
        return load_tokenizer(local, revision=None, chat_template_path=None, key="task.folder")


def _written(config: Config, task: TokenizerTaskConfig, folder: str, training: Drawn) -> PreTrainedTokenizerBase:
    """Train, save and load the tokenizer as a run does; return the one that was loaded.

    Raises:
        ConfigError: the texts are too few, or the chat format does not fit.
    """
    tokenizer = trained(task, training.texts)
    with tempfile.TemporaryDirectory(prefix="tokenizer_") as local:
        tokenizer.save_pretrained(local)
        loaded = load_tokenizer(
            local,
            revision=None,
            chat_template_path=config.model.chat_template_path,
            chat_format=config.model.chat_format,
            key="task.folder",
        )
        if encoded(loaded, HARD_LINES) != encoded(tokenizer, HARD_LINES):
            raise RuntimeError("transformers loads a tokenizer with other ids than were saved")
        if loaded.chat_template:
            tokenizer.chat_template = loaded.chat_template
            tokenizer.save_pretrained(local)
        paths.make_dirs(folder)
        paths.write_text_atomic(paths.join(folder, BEGUN), "{}\n")
        for file in sorted(Path(local).iterdir()):
            paths.write_bytes_atomic(paths.join(folder, file.name), file.read_bytes())
    return loaded
