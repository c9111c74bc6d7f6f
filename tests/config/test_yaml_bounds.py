"""YAML that would fill the memory, written out, is refused from its events alone."""

from pathlib import Path

import pytest

from tests.config.composing import CONF, composed
from tpu_experiments.config.errors import ConfigError
from tpu_experiments.config.yaml_bounds import MAX_DEPTH, MAX_NODES, require_bounded, require_bounded_folder
from tpu_experiments.storage.run_folder import config_yaml

LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10) if i else 'ha, ha'}]\n" for i in range(10))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, MAX_DEPTH + 9))
REFUSED = {
    "laughs": (LAUGHS, "aliases counted"),
    "mappings that laugh": (LAUGHS.replace("[", "{k: [").replace("]\n", "]}\n"), "aliases counted"),
    "merged": ("a: &a {" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}\nb: [" + "{<<: *a}, " * 9 + "]", "counted"),
    "levels": ("[" * 100_000, "levels deep"),
    "block levels": ("".join(" " * i + "- \n" for i in range(600)), "levels deep"),
    "levels by aliases": (CHAIN, "levels deep"),
    "an alias inside itself": ("a: &a {b: *a}", "is inside the node that it names"),
    "values": ("[" + "1," * (MAX_NODES + 1) + "]", "keys and values"),
    "bytes": ("a: " + "x" * 600_000, "bytes"),
    "a number to base 60": ("a: 1" + ":00" * 100_000, "a number of"),
    "digits": ("a: " + "9" * 10_000, "a number of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    text, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words) as caught:
        require_bounded(text, place="config.yaml")
    assert str(caught.value).startswith("config.yaml; ")


def test_what_a_config_is_passes() -> None:
    require_bounded(config_yaml(composed("experiment=mistral7b_ro")), place="x")
    require_bounded("a: &a {x: [1, 2]}\nb: {<<: *a, y: *a}\n", place="x")
    require_bounded("a: [", place="x")  # a mistake in the syntax is for who reads it
    require_bounded_folder(CONF)


def test_a_file_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "laughs.yaml").write_text(LAUGHS)
    with pytest.raises(ConfigError, match=r"data/laughs\.yaml; written out it has more than"):
        require_bounded_folder(tmp_path)
    (tmp_path / "data" / "laughs.yaml").write_bytes(b"\x80\x04")
    with pytest.raises(ConfigError, match=r"data/laughs\.yaml; it is not UTF-8"):
        require_bounded_folder(tmp_path)
