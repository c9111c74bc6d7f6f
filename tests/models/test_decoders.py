"""Model types that went wrong once: computed as transformers does, or refused with the reason, and never a traceback.

All of them are compared by `python -m tests.benchmarks.decoders`.
"""

import pytest
import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from tests.benchmarks.decoders import small_config, tried
from tpu_experiments.models.adapters.lora import is_linear
from tpu_experiments.models.huggingface import count_problems
from tpu_experiments.models.parts.attention import same_chunk
from tpu_experiments.models.parts.rope import row_limits
from tpu_experiments.models.passes.forward import attention_masks

pytestmark = [
    pytest.mark.xla,
    pytest.mark.filterwarnings("ignore"),  # PEFT's and transformers' own, of keys and of what they deprecate
]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def found():
    def compare(name: str) -> dict:
        import torch_xla

        torch_xla.device()  # before the first backward pass
        result = tried(name)
        assert "where" not in result, result["where"]
        return result

    return compare


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param("gemma4_text", "flash", marks=pytest.mark.slow),
        ("gemma4_text: layers that share keys", "flash"),  # and have heads of two widths
        ("phimoe", "flash"),  # a router that is a Linear and returns a tuple
        ("axk1", "flash"),  # a buffer that a checkpoint may lack, and has
        ("got_ocr2", "flash"),  # a head that is tied by the config of the whole
        ("camembert", "flash"),  # the head is registered before the embedding that it is tied to
        ("codegen", "eager"),  # flash ignores documents
        ("falcon", "sdpa"),  # its class has an attention of its own
        ("roberta", "flash"),  # the first position is 2
        ("qwen3_next", "flash"),  # states, and experts beside a shared one
        ("qwen3_next: linear attention alone", "flash"),
        pytest.param("qwen3_5_moe_text", "flash", marks=pytest.mark.slow),
        pytest.param("olmo_hybrid", "flash", marks=pytest.mark.slow),  # learning rates up to 2
    ],
)
def test_right_with_documents_in_a_row(name, attention, found):
    result = found(name)
    assert (result["outcome"], result["attention"], result["rows"]) == ("right", attention, "packed")
    assert {"adapter", "gradients", "folded"} <= set(result["apart"])
    assert "generated" not in result["refusals"]


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("lfm2: convolutions", "flash"),
        ("llama4_text", "sdpa"),  # positions of the row scale its queries
    ],
)
def test_documents_in_a_row_are_refused_and_one_is_right(name, attention, found):
    result = found(name)
    assert (result["outcome"], result["attention"], result["rows"]) == ("right", attention, "one document")
    assert "a document changes the logits of the next one in its row" in result["refusals"][attention]
    assert "set prepare.packing=pad" in result["refusals"][attention]
    assert {"sdpa, one document", "eager, one document"} <= set(result["apart"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "transformers' bloom does not compute with the masks and positions of documents"),
        ("xlm", "transformers' xlm does not compute with the masks and positions of documents"),
        ("phi3: LongRoPE of long rows", "original_max_position_embeddings=16"),
        ("bert: an encoder", "not those that it computes for a document alone"),
    ],
)
def test_refused_with_the_reason(name, reason, found):
    result = found(name)
    assert result["outcome"] == "refused"
    assert reason in result["refusals"]["eager"] + result["refusals"]["eager, one document"]


@pytest.mark.parametrize("name", ["marian", "falcon_h1"])
def test_generating_is_refused_where_padding_or_a_state_would_change_the_answer(name, found):
    result = found(name)
    assert result["outcome"] == "right"
    assert "transformers' generate." in result["refusals"]["generated"]


@pytest.mark.parametrize("name", ["glm4_moe", "laguna"])
def test_adapters_that_peft_takes_for_those_of_experts_are_refused(name, found):
    result = found(name)
    assert result["outcome"] == "right"
    assert "PEFT leaves adapters of down_proj, gate_proj, up_proj out" in result["refusals"]["adapter"]
    assert not {"down_proj", "gate_proj", "up_proj"} & set(result["targets"])
    assert result["apart"]["adapter"] < 1e-5 < result["adapter moves"]


def test_masks_are_those_of_the_kinds_of_layers():
    segments = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0]])
    chunked = attention_masks(segments, config=small_config("llama4_text"))
    assert set(chunked) == {"full_attention", "chunked_attention"}
    positions = [0, 1, 2, 3, 4, 0, 1, 2, 3, 0]
    expected = [[positions[a] // 3 == positions[b] // 3 for b in range(10)] for a in range(10)]
    assert same_chunk(segments, size=3)[0, 0].tolist() == expected
    config = small_config("llama4_text")
    config.attention_chunk_size = 3
    both = attention_masks(segments, config=config)
    assert torch.equal(both["chunked_attention"], both["full_attention"] & same_chunk(segments, size=3))
    states = attention_masks(segments, config=small_config("qwen3_next"))
    assert states["linear_attention"] is None
    assert states["full_attention"].shape == (1, 1, 10, 10)


def test_a_subclass_of_linear_is_one_if_it_computes_its_product():
    router = PhimoeTopKRouter(small_config("phimoe"))
    assert isinstance(router, nn.Linear)
    assert not is_linear(router)
    assert is_linear(FalconLinear(4, 8))
    assert is_linear(FalconLinear(4, 8, bias=False))
    assert is_linear(nn.Linear(4, 8))
    assert not is_linear(nn.Embedding(4, 8))


def test_rows_are_no_longer_than_what_longrope_computes_in_one_way():
    limits = row_limits(small_config("phi3: LongRoPE"))
    assert limits == {"max_position_embeddings": 128, "original_max_position_embeddings": 64}
    assert row_limits(small_config("llama: YaRN")) == {"max_position_embeddings": 128}


def test_a_triangular_system_on_torch_xla_is_refused_by_name():
    """transformers' gated delta rule solves one; in a traced layer torch_xla 2.9.0 ended with a segmentation fault."""
    import torch_xla

    from tpu_experiments.runtime.xla.host_reads import HostRead, NoHostReads

    matrix = torch.eye(4).to(torch_xla.device())
    for solve in (torch.linalg.solve_triangular, torch.ops.aten.linalg_solve_triangular.default):
        with (
            pytest.raises(HostRead, match=r"train reads a tensor on the host .*solve_triangular"),
            NoHostReads("train", device_type="xla", count_reads=lambda: 0),
        ):
            solve(matrix, matrix, upper=False)


def test_sizes_of_single_layers_are_counted():
    config = small_config("gemma3n_text")
    assert count_problems(config, where="x") == []
    config.intermediate_size = [96, 0, 96, 96]
    assert "intermediate_size=[96, 0, 96, 96]" in count_problems(config, where="x")[0]
    assert count_problems(small_config("gemma4_text"), where="x") == []
