"""The tokenizer beside what was exported, with the chat template that was trained with."""

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
            values["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows as well as 5
        settings.write_text(json.dumps(values, indent=2, ensure_ascii=False), encoding="utf-8")
        for file in sorted(Path(local).iterdir()):
            paths.write_bytes_atomic(paths.join(folder, file.name), file.read_bytes())
