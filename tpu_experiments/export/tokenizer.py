"""Export of the tokenizer, with the chat template used in training, beside a model or adapter."""

import json
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tpu_experiments.storage import paths


def write_tokenizer(folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the files that `AutoTokenizer.from_pretrained(folder)` reads, chat template included."""
    with tempfile.TemporaryDirectory() as local:
        tokenizer.save_pretrained(local)
        settings = Path(local) / "tokenizer_config.json"
        values = json.loads(settings.read_text(encoding="utf-8"))
        if values.get("tokenizer_class") == "TokenizersBackend":
            values["tokenizer_class"] = "PreTrainedTokenizerFast"  # the class name that transformers 4 and 5 both know
        settings.write_text(json.dumps(values, indent=2, ensure_ascii=False), encoding="utf-8")
        for file in sorted(Path(local).iterdir()):
            paths.write_bytes_atomic(paths.join(folder, file.name), file.read_bytes())
