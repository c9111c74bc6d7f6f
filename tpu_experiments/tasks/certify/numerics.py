"""A small checkpoint of random weights, as training computes it and as transformers and PEFT do.

Every comparison returns the largest difference as a share of the largest value. Legend: T tokens, V vocabulary.
"""

import copy
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig, PreTrainedModel

from tpu_experiments.config.errors import one_line
from tpu_experiments.config.hardware import HwConfig
from tpu_experiments.config.model_schema import PATTERNS, LoraConfig, ModelConfig
from tpu_experiments.config.task_schema import ChoiceConfig
from tpu_experiments.export.full import write_model
from tpu_experiments.export.peft import write_adapter, written_experts
from tpu_experiments.export.weights import whole_model
from tpu_experiments.models.adapters.embeddings import adapted_embedding
from tpu_experiments.models.adapters.experts import adapted_parameters
from tpu_experiments.models.adapters.lora import adapted_weights, require_read_by_peft
from tpu_experiments.models.adapters.token_rows import token_rows, trained_rows_of
from tpu_experiments.models.huggingface import HEADS, HuggingFaceModel, decoder_config
from tpu_experiments.models.passes.forward import capped, has_plain_head, hidden_of, logits_of, row_losses, soft_cap_of
from tpu_experiments.models.passes.generation import Decoder
from tpu_experiments.models.passes.loss import chunked_row_losses
from tpu_experiments.models.sources.build import BuiltModel, build_model
from tpu_experiments.models.sources.frozen import build_frozen
from tpu_experiments.models.sources.isolation import packed_row
from tpu_experiments.objectives.base import Computing
from tpu_experiments.runtime.eager import EagerRuntime
from tpu_experiments.runtime.ops import Folding, python_loop
from tpu_experiments.runtime.stacked import (
    EMBEDDING_PARTS,
    TOKEN_ROWS,
    hugging_face_names,
    is_adapter_part,
    is_of_parameter,
    is_stack,
    unstacked,
    weight_of,
)
from tpu_experiments.tasks.certify.float64 import in_float64, widened

DOCUMENTS = (19, 11)
"""Tokens of the two documents of a row: longer than any window of the small configs, and unequal."""
NUM_TOKENS = 5
"""Upper bound of the tokens whose rows are trained."""
TOLERANCE = 1e-5
"""Of the largest logit; sums in another order move logits by 1e-6 of it."""
GRADIENT_TOLERANCE = 1e-5
"""Of the largest of a tensor's gradients, which are compared in float64: float32 moves them by 1e-4 (float64.py)."""
FOLDING = Folding(loop=python_loop)
RANK = 4
CHUNKED = Computing(chunk_tokens=8)
"""Logits of some tokens at once, as a run computes its loss."""
NEW, BUCKET = 8, 16
"""Tokens that are generated, and slots of the prompt: some are padding."""
Rows = Mapping[str, Tensor]


def write_random(config: PretrainedConfig, folder: Path, *, head: str = "causal_lm") -> PreTrainedModel:
    """Write a checkpoint of weights and buffers that move logits; return it as transformers reads it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = HEADS[head].auto.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
        own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
            for name, tensor in model.state_dict().items():
                if name not in own and tensor.is_floating_point():
                    tensor.add_(torch.rand_like(tensor), alpha=0.05)
    model.save_pretrained(folder)
    return read_back(folder, head=head)


def read_back(folder: Path, *, head: str = "causal_lm") -> PreTrainedModel:
    """Read a checkpoint by transformers, with the plainest attention and experts that its class has."""
    auto = HEADS[head].auto
    for attention in ("eager", "sdpa", None):
        chosen = {} if attention is None else {"attn_implementation": attention}
        try:
            model = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False, **chosen)
        except ValueError:
            if attention is None:
                raise
            continue
        whole: PreTrainedModel = model.eval()
        for part in whole.modules():
            if hasattr(part, "config"):
                part.config._experts_implementation = "eager"  # torch's grouped products take no float64
        return whole
    raise AssertionError


def rows_of(lengths: tuple[int, ...], *, vocabulary: int) -> dict[str, Tensor]:
    """Draw a row of documents of these lengths, with padding behind them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, vocabulary - 5, (sum(lengths),), generator=generator)
    row = {name: tensor.int() for name, tensor in packed_row(ids, lengths=lengths).items()}
    return row | {"learn": (row["segments"] > 0).int()}


def alone(model: nn.Module, rows: Rows) -> Tensor:
    """Return what transformers computes for each document by itself, (T, V)."""
    with torch.no_grad():
        return torch.cat([_logits(model, part) for part in documents_of(rows)])


def documents_of(rows: Rows) -> list[Tensor]:
    """Return the ids (1, T) of each document of a row."""
    segments = rows["segments"][0]
    return [rows["ids"][:, segments == number].long() for number in segments[segments > 0].unique()]


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference as a share of the largest value; infinite where one is NaN."""
    found = float((ours - theirs).abs().max() / theirs.abs().max())
    return found if found == found else float("inf")


@dataclass(frozen=True)
class Adapted:
    """An adapter beside PEFT's."""

    logits: float
    gradients: float | None
    """None where PEFT does not take the model, and the adapter was merged instead."""
    moves: float
    """What the adapter itself does to the logits."""
    targets: list[str]
    peft: str = ""
    """Why PEFT does not take the model; empty where it does."""


class SmallCheckpoint:
    """A folder with a small checkpoint, and the same as transformers reads it.

    Args:
        lora: adapters; B is drawn, so that they change the logits.
        head, causal: as of `HuggingFaceModel`.
    """

    def __init__(
        self,
        folder: Path,
        reference: PreTrainedModel,
        *,
        name: str,
        lora: LoraConfig,
        head: str = "causal_lm",
        causal: bool = True,
    ) -> None:
        self.folder, self.reference, self.name, self.lora = folder, reference, name, lora
        self.head, self.causal = head, causal
        self.vocabulary = int(decoder_config(reference.config).vocab_size)
        if lora is not None and lora.trainable_token_indices:  # tokens that the rows have
            tokens = self.rows(is_packed=True)["ids"][0, :NUM_TOKENS].unique().tolist()
            self.lora = replace(lora, trainable_token_indices=dict.fromkeys(lora.trainable_token_indices, tokens))

    def rows(self, *, is_packed: bool) -> dict[str, Tensor]:
        """Return a row of two documents, or of one."""
        return rows_of(DOCUMENTS if is_packed else DOCUMENTS[:1], vocabulary=self.vocabulary)

    def source(self, attention: str) -> HuggingFaceModel:
        """Return the source of the checkpoint, as training reads it."""
        model = ModelConfig(name=self.name, path=str(self.folder), dtype="float32", attention=attention)
        return HuggingFaceModel(model, seed=0, head=self.head, causal=self.causal)

    def built(self, source: HuggingFaceModel, *, lora: LoraConfig | None = None, folds: bool = False) -> BuiltModel:
        """Build the model as training does, or with its layers in a loop."""
        lora = LoraConfig(r=0) if lora is None else lora
        folding = FOLDING if folds else None
        made = build_model(source, lora=lora, seed=0, place=lambda tensor, name: tensor, folding=folding)
        made.module.eval()
        with torch.no_grad():
            for name, tensor in made.trainable.items():
                if name.endswith("lora_B"):
                    shape = tensor.shape[1:] if is_stack(name) else tensor.shape
                    parts = [drawn(each, shape) for each in hugging_face_names(name)]
                    tensor.copy_(torch.cat(parts).view_as(tensor))
                elif name.endswith((EMBEDDING_PARTS[0], TOKEN_ROWS)):
                    tensor.add_(drawn(name, tensor.shape))
        return made

    def logits(self, built: BuiltModel, rows: Rows) -> Tensor:
        """Return the logits (T, V) of the documents of a row by training's forward pass."""
        with torch.no_grad():
            found = logits_of(built.module, built.trainable, rows, causal=self.causal)
        return found[0][rows["segments"][0] > 0]

    def logits_apart(self, built: BuiltModel, rows: Rows, expected: Tensor) -> dict[str, float]:
        """Compare logits, and those of hidden states times the head, with transformers'."""
        found = {"logits": apart(self.logits(built, rows), expected)}
        if self.causal and has_plain_head(built.module):
            with torch.no_grad():
                hidden, head = hidden_of(built.module, built.trainable, rows)
                logits = capped(hidden @ head.T, soft_cap_of(built.module))
            found["head"] = apart(logits[0][rows["segments"][0] > 0], expected)
        return found

    def folds(self, source: HuggingFaceModel, rows: Rows, *, lora: LoraConfig | None) -> tuple[float, bool]:
        """Compare logits of the layers in a loop with those of the layers one by one; and whether any are in a loop."""
        folded = self.built(source, lora=lora, folds=True)
        has_loop = any("FoldedLayers" in type(part).__name__ for part in folded.module.modules())
        unrolled = self.logits(self.built(source, lora=lora), rows)
        return apart(self.logits(folded, rows), unrolled), has_loop

    def generates(self, source: HuggingFaceModel, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Return the likeliest tokens after a prompt: ours with a cache, and transformers' without one."""
        module = build_frozen(source, lora=LoraConfig(r=0), trained={}, place=lambda tensor, name: tensor)
        how: dict[str, Any] = {"num_rows": 1, "max_new_tokens": NEW, "tokens_per_call": 4, "seed": 0}
        decoder = Decoder(module, runtime=EagerRuntime(HwConfig(num_threads=1)), choice=ChoiceConfig(), **how)
        *_, (ours,) = decoder.stream([prompt], draws=[0], bucket=BUCKET)
        theirs = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NEW):
                theirs = torch.cat([theirs, _logits(self.reference, theirs)[None, -1:].argmax(-1)], dim=1)
        return list(ours), theirs[0, len(prompt) :].tolist()

    def adapts(self, source: HuggingFaceModel, rows: Rows, expected: Tensor) -> Adapted:
        """Compare logits and gradients of adapters with PEFT's of the same values, read from the files of an export.

        Raises:
            ConfigError: PEFT would leave some of the adapters out.
            ImportError: PEFT is not installed.
        """
        import peft

        built = self.built(source, lora=self.lora)
        require_read_by_peft(built.module, self.lora)
        parts = [name.rpartition(".")[0] for name in unstacked(dict(built.trainable)) if is_adapter_part(name)]
        weights = [weight_of(part) if is_of_parameter(part) else part for part in parts]
        targets = sorted({name.rpartition(".")[2] for name in weights})
        whole, reason = self._with_adapter(source, built)
        theirs = alone(whole, rows)
        logits = apart(self.logits(built, rows), theirs)
        gradients = None
        if isinstance(whole, peft.PeftModel):

            def in_peft(ours: Rows) -> dict[str, Tensor]:
                outer = written_experts({source.outer_name(name): tensor for name, tensor in ours.items()})
                return {peft_name(name): tensor for name, tensor in outer.items()}

            gradients = self._gradients_apart(whole, rows, built=built, moved=in_peft)
        return Adapted(logits, gradients, apart(theirs, expected), targets, peft=reason)

    def trains(self, source: HuggingFaceModel, rows: Rows) -> float:
        """Compare gradients of all weights with transformers' own."""
        whole = copy.deepcopy(self.reference)

        def in_transformers(ours: Rows) -> dict[str, Tensor]:
            return {source.outer_name(name): tensor for name, tensor in ours.items()}

        return self._gradients_apart(whole, rows, built=self.built(source), moved=in_transformers)

    def exports(self, source: HuggingFaceModel, rows: Rows, *, lora: LoraConfig | None) -> float:
        """Compare logits of the model with its adapters with those of the merged export, as transformers reads it."""
        built = self.built(source, lora=lora)
        trained = {name: tensor.detach() for name, tensor in built.trainable.items()} if lora is not None else {}
        model = whole_model(source, lora=lora or LoraConfig(r=0), trained=trained)
        with tempfile.TemporaryDirectory() as folder:
            write_model(
                folder,
                tensors=model.tensors(),
                shapes=model.shapes,
                config=model.config,
                architecture=model.architecture,
                dtype=torch.float32,
                tokenizer=None,
            )
            theirs = alone(read_back(Path(folder), head=self.head), rows)
        return apart(self.logits(built, rows), theirs)

    def _gradients_apart(
        self, whole: nn.Module, rows: Rows, *, built: BuiltModel, moved: Callable[[Rows], dict[str, Tensor]]
    ) -> float:
        """Return the largest difference of gradients, as a share of each tensor's largest; both models become float64.

        Args:
            moved: gradients by the names, and in the shapes, of the parameters of `whole`.
        """
        parameters = dict(whole.named_parameters())
        places = {id(p): p.data_ptr() for p in parameters.values()}  # in float64 each has memory of its own
        with in_float64(built.module, whole), _one_thread():
            ours = moved(self._gradients(built, rows))
            theirs = {name: parameters[name] for name in ours}
            twins = _twins(theirs, parameters, places=places)
            for parameter in (*theirs.values(), *twins.values()):
                parameter.requires_grad_(True)
            loss = torch.zeros(())
            for ids in documents_of(rows):
                loss = loss + self._loss(_logits(whole, ids), ids[0])
            found = torch.autograd.grad(loss, [*theirs.values(), *twins.values()], allow_unused=True)
        by_name = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(theirs.items(), found, strict=False)}
        for name, grad in zip(twins, found[len(theirs) :], strict=True):
            by_name[name] = by_name[name] + (0 if grad is None else grad.T)
        largest = max(float(g.abs().max()) for g in by_name.values())
        shares = [
            float((ours[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-2 * largest)
            for name, grad in by_name.items()
        ]
        return max(share if share == share else float("inf") for share in shares)

    def _loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the loss of one document: of its next tokens, or of its own where it is read on both sides."""
        if self.causal:
            return cross_entropy(logits[:-1], ids[1:], reduction="sum")
        return cross_entropy(logits, ids, reduction="sum")

    def _gradients(self, built: BuiltModel, rows: Rows) -> dict[str, Tensor]:
        """Return the gradients of the row's loss under Hugging Face's names."""
        leaves = {name: widened(tensor.detach()).requires_grad_() for name, tensor in built.trainable.items()}
        if self.causal:
            loss = _next_token_loss(built.module, leaves, rows)
        else:
            is_document = rows["segments"][0] > 0
            logits = logits_of(built.module, leaves, rows, causal=False)[0][is_document]
            loss = self._loss(logits, rows["ids"][0][is_document].long())
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        pairs = zip(leaves, found, strict=True)
        return unstacked({name: torch.zeros_like(leaves[name]) if g is None else g for name, g in pairs})

    def _with_adapter(self, source: HuggingFaceModel, built: BuiltModel) -> tuple[nn.Module, str]:
        """Return transformers' model with the adapter as PEFT reads it; merged, and why, where PEFT does not."""
        import peft

        values = {source.outer_name(name): tensor for name, tensor in built.trainable.items()}
        with tempfile.TemporaryDirectory() as place:
            write_adapter(
                place,
                parameters=values,
                initial={},
                lora=self.lora,
                base_path=str(self.folder),
                revision=None,
                is_transposed=any(adapted_weights(built.module).values()),
                tied=source.tied_names,
            )
            try:
                base = read_back(self.folder, head=self.head)
                whole: nn.Module = peft.PeftModel.from_pretrained(base, place, trust_remote_code=False)
                return whole.eval(), ""
            except Exception as error:  # PEFT's own, of a model that it does not know
                reason = one_line(error, most=300)
        trained = {name: tensor.detach() for name, tensor in built.trainable.items()}
        model = whole_model(source, lora=self.lora, trained=trained)
        merged = read_back(self.folder, head=self.head)
        vocabulary = {*token_rows(built.module), adapted_embedding(built.module)[0]}
        weights = {**adapted_weights(built.module), **adapted_parameters(built.module)}
        with torch.no_grad():
            for name, tensor in model.tensors():
                if name in weights or name in vocabulary:
                    merged.get_parameter(source.outer_name(name)).copy_(tensor)
        return merged, reason


def _next_token_loss(module: nn.Module, leaves: Mapping[str, Tensor], rows: Rows) -> Tensor:
    """Return the sum of the losses of next tokens, from logits of a few tokens at once where the head allows it."""
    if not has_plain_head(module):
        return row_losses(logits_of(module, leaves, rows), rows)[0].sum()
    hidden, head = hidden_of(module, leaves, rows)
    terms = CHUNKED.terms(hidden, soft_cap=soft_cap_of(module), rows_N=trained_rows_of(module))
    return chunked_row_losses(hidden, head, rows, terms)[0].sum()


def small_lora(lora: LoraConfig) -> LoraConfig:
    """Return adapters of a small rank with the same ratio of alpha to it, whose start is that of plain LoRA.

    Modules that are trained whole, and ranks and alphas of single modules, are left out; rows are those of few tokens.
    """
    r, plain = min(lora.r, RANK), LoraConfig(r=1)
    left_out = {name: getattr(plain, name) for name in (*PATTERNS, "modules_to_save")}
    left_out["trainable_token_indices"] = {name: list(range(1, NUM_TOKENS)) for name in lora.trainable_token_indices}
    return replace(lora, r=r, alpha=lora.alpha * r / lora.r, init="b_zero", dropout=0.0, **left_out)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Differentiate in this thread: torch sets up others for the devices that it knew at its first backward pass."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


def drawn(name: str, shape: torch.Size) -> Tensor:
    """Draw B of one layer by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.05


def _twins(
    theirs: Mapping[str, nn.Parameter], parameters: Mapping[str, nn.Parameter], *, places: Mapping[int, int]
) -> dict[str, nn.Parameter]:
    """Return a tied head's parameters in PEFT, which are the embedding's transposed and share their memory."""
    own = {name: p for name, p in theirs.items() if name.removesuffix(".default").endswith(EMBEDDING_PARTS)}
    known = {id(p) for p in theirs.values()}
    others = {places[id(p)]: p for p in parameters.values() if id(p) not in known}
    return {name: others[places[id(p)]] for name, p in own.items() if places[id(p)] in others}


def peft_name(name: str) -> str:
    """Return PEFT's name of an adapter's parameter in a model that it wraps."""
    path, _, part = name.rpartition(".")
    if part == TOKEN_ROWS:
        return f"base_model.model.{path}.token_adapter.{part}.default"
    if part in EMBEDDING_PARTS:
        return f"base_model.model.{name}.default"
    return f"base_model.model.{path}.{part}.default.weight"
