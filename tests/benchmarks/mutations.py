"""Defects put into the code one at a time: which test finds each.

    python -m tests.benchmarks.mutations OUTPUT [WORD ...]     # prints a Markdown table; only defects that name a WORD

Each defect is one replacement in a copy of the tracked files under OUTPUT. The tests of its subject run there until one
fails; a defect that they pass is shown as NOT FOUND, and the exit code is 1.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)


@dataclass(frozen=True)
class Defect:
    """One replacement in one file, and the tests of its subject."""

    what: str
    file: str
    old: str
    new: str
    tests: str


_READERS = (
    "tests/data/reading/test_fields.py tests/data/reading/test_formats.py tests/data/reading/test_recognise.py "
    "tests/data/test_not_read.py"
)
DEFECTS = (
    Defect(
        "LoRA's scale has the wrong sign",
        "tpu_experiments/models/adapters/lora.py",
        "return lora.alpha / (",
        "return -lora.alpha / (",
        "tests/models/test_lora_peft.py tests/models/test_lora_inject.py",
    ),
    Defect(
        "the causal mask hides a token from itself",
        "tpu_experiments/models/parts/attention.py",
        "(distance_TT >= 0)",
        "(distance_TT > 0)",
        "tests/models/test_masks.py tests/models/test_attention.py",
    ),
    Defect(
        "a target in the next document counts",
        "tpu_experiments/models/passes/forward.py",
        "(next_learn * same * (",
        "(next_learn * (",
        "tests/models/test_masks.py tests/models/test_loss.py",
    ),
    Defect(
        "the second moment is not squared",
        "tpu_experiments/optim/adamw.py",
        "* g.square()",
        "* g.abs()",
        "tests/optim",
    ),
    Defect(
        "the cosine ends a step late",
        "tpu_experiments/optim/schedules.py",
        "max(1, num_steps - 1 - start)",
        "max(1, num_steps - start)",
        "tests/optim",
    ),
    Defect(
        "gradients are not clipped",
        "tpu_experiments/training/step.py",
        "self.updates.clipped(named, norm=norm)",
        "named",
        "tests/training/test_step.py tests/training/test_parity.py tests/training/test_processes.py",
    ),
    Defect(
        "the loss is divided by the rows of one process",
        "tpu_experiments/training/step.py",
        "(total,) = self.sum_over_processes([supervised])",
        "total = supervised",
        "tests/training/test_step.py tests/training/test_processes.py",
    ),
    Defect(
        "a process reads its neighbour's rows",
        "tpu_experiments/data/batches.py",
        "part = slice(rank * share, (rank + 1) * share)",
        "part = slice(0, share)",
        "tests/data/test_batches.py tests/training/test_processes.py",
    ),
    Defect(
        "evaluation and test overlap",
        "tpu_experiments/data/cleaning/split.py",
        "_bound(eval_fraction + test_fraction)",
        "_bound(test_fraction)",
        "tests/data/cleaning",
    ),
    Defect(
        "the last row is lost",
        "tpu_experiments/data/steps/pack.py",
        "num_rows = len(pieces.length_P)",
        "num_rows = len(pieces.length_P) - 1",
        "tests/data/steps",
    ),
    Defect(
        "a checkpoint does not keep the best",
        "tpu_experiments/checkpoint/retention.py",
        "*multiples, *best, *keep",
        "*multiples, *keep",
        "tests/checkpoint",
    ),
    Defect(
        "what is read back is not compared with its checksum",
        "tpu_experiments/checkpoint/reading.py",
        "if digest != facts.sha256:",
        "if False:",
        "tests/checkpoint",
    ),
    Defect(
        "a lease is not renewed",
        "tpu_experiments/storage/lease.py",
        "paths.write_text_atomic(self.path, _text(self._owner))\n                self._renewed_at",
        "self._renewed_at",
        "tests/storage/test_lease.py",
    ),
    Defect(
        "PiSSA's adapter keeps its old rank",
        "tpu_experiments/export/peft.py",
        "r=2 * lora.r",
        "r=lora.r",
        "tests/models/test_lora_peft.py tests/export",
    ),
    Defect(
        "dollars are those of one chip",
        "tpu_experiments/planning/money.py",
        "hourly = chip_hour(price).times(num_devices)",
        "hourly = chip_hour(price).times(1)",
        "tests/planning",
    ),
    Defect(
        "bits per byte are nats per byte",
        "tpu_experiments/metrics/held_out.py",
        "(math.log(2) * num_bytes)",
        "num_bytes",
        "tests/metrics",
    ),
    Defect(
        "the batch is not split over the devices",
        "tpu_experiments/runtime/sharding.py",
        "rows if dim == rows_dim and ndim > 1 else None",
        "None",
        "tests/runtime",
    ),
    Defect(
        "the worst point of a sweep is the best",
        "tpu_experiments/metrics/ranking.py",
        "math.inf if loss is None else loss",
        "math.inf if loss is None else -loss",
        "tests/sweeping",
    ),
    Defect(
        "a changed seed is the same run",
        "tpu_experiments/config/identity.py",
        "if not key.startswith(MAY_CHANGE)}",
        'if not key.startswith((*MAY_CHANGE, "seed"))}',
        "tests/config",
    ),
    Defect(
        "top_p leaves out the token that reaches it",
        "tpu_experiments/models/passes/generation.py",
        "before_BC = probabilities_BC.cumsum(-1) - probabilities_BC",
        "before_BC = probabilities_BC.cumsum(-1)",
        "tests/models/generation",
    ),
    Defect(
        "a launch forgets what earlier machines cost",
        "launch/tpu_vm/money.py",
        "return record.usd_before + present * limits.usd_per_hour",
        "return present * limits.usd_per_hour",
        "tests/launch/test_edges.py tests/launch/test_rules.py tests/launch/test_train.py",
    ),
    Defect(
        "a report marks the highest loss as best",
        "tpu_experiments/tasks/report/tables.py",
        '_of("eval_loss"), ",.4f", best=min)',
        '_of("eval_loss"), ",.4f", best=max)',
        "tests/tasks/test_report.py",
    ),
    Defect(
        "adapters of a pack have a scale of 1",
        "tpu_experiments/models/adapters/packed.py",
        "F.pad(t * scale, ",
        "F.pad(t, ",
        "tests/training/test_pack.py",
    ),
    Defect(
        "an ended run of a pack is trained on",
        "tpu_experiments/training/step.py",
        "is_finite & (batch[ACTIVE] > 0)[0]",
        "is_finite",
        "tests/training/test_pack.py",
    ),
    Defect(
        "the canaries' rows have a reference of 0",
        "tpu_experiments/training/canary.py",
        "reads_reference() and trainer.runtime.share[1] == 1",
        "reads_reference() and False",
        "tests/training/test_preference_canary.py",
    ),
    Defect(
        "a pack evaluates the first adapter for all",
        "tpu_experiments/models/adapters/packed.py",
        "self._number.long()",
        "self._number.long() * 0",
        "tests/training/test_pack.py",
    ),
    Defect(
        "rows: a row's system text is not read",
        "tpu_experiments/data/reading/formats.py",
        "    _add_system(record, turns, spec=spec)\n",
        '    record.mark("system")\n',
        _READERS,
    ),
    Defect(
        "rows: two system texts, the row's is dropped",
        "tpu_experiments/data/reading/formats.py",
        "    elif turns[0].content.strip() != text.strip():\n",
        "    elif False:\n",
        _READERS,
    ),
    Defect(
        "rows: earlier turns are marked as read and left out",
        "tpu_experiments/data/reading/formats.py",
        "return [*turns[:place], *earlier, *turns[place:]]",
        "return turns",
        _READERS,
    ),
    Defect(
        "rows: earlier answers beside a prompt are learnt",
        "tpu_experiments/data/reading/formats.py",
        'for turn in earlier if spec.format == "prompt_completion" else []:',
        "for turn in ():",
        _READERS,
    ),
    Defect(
        "rows: a turn's reasoning keeps the file's name",
        "tpu_experiments/data/reading/turns.py",
        "            extra[REASONING] = self.reasoning\n",
        '            extra["reasoning"] = self.reasoning\n',
        _READERS,
    ),
    Defect(
        "rows: one name of reasoning is forgotten",
        "tpu_experiments/data/reading/names.py",
        "(reasoning|thinking|thoughts?|think|",
        "(reasoning|thinking|thoughts|think|",
        _READERS,
    ),
    Defect(
        "rows: reasoning of a row is not read",
        "tpu_experiments/data/reading/formats.py",
        '            answer.reasoning = reasoning_of(record, where="the row")\n',
        "            pass\n",
        _READERS,
    ),
    Defect(
        "rows: a setting is learnt as reasoning",
        "tpu_experiments/data/reading/turns.py",
        " or (isinstance(value, str) and value.strip().lower() in SETTINGS)",
        "",
        _READERS,
    ),
    Defect(
        "rows: loss on a turn is ignored",
        "tpu_experiments/data/reading/names.py",
        "supervised?|loss)|lossmask",
        "supervised?)|lossmask",
        _READERS,
    ),
    Defect(
        "rows: masked is read the wrong way round",
        "tpu_experiments/data/reading/names.py",
        "Mark(False, _EITHER)",
        "Mark(True, _EITHER)",
        _READERS,
    ),
    Defect(
        "rows: a weight between 0 and 1 is learnt",
        "tpu_experiments/data/reading/turns.py",
        "or value not in (0, 1):",
        "or not 0 <= value <= 1:",
        _READERS,
    ),
    Defect(
        "rows: marks that differ, the first counts",
        "tpu_experiments/data/reading/turns.py",
        "    if len(set(learnt.values())) > 1:\n",
        "    if False:\n",
        _READERS,
    ),
    Defect(
        "rows: bare functions are not wrapped",
        "tpu_experiments/data/reading/tools.py",
        'return [tool if "function" in tool else _wrapped(tool) for tool in tools]',
        "return tools",
        _READERS,
    ),
    Defect(
        "rows: the old function_call is dropped",
        "tpu_experiments/data/reading/names.py",
        're.compile(r"(tool|function)calls?")',
        're.compile(r"toolcalls?")',
        _READERS,
    ),
    Defect(
        "rows: arguments stay JSON text",
        "tpu_experiments/data/reading/tools.py",
        "values = from_json(arguments[1]) if arguments is not None else None",
        "values = arguments[1] if arguments is not None else None",
        _READERS,
    ),
    Defect(
        "rows: a turn for each call stays a turn",
        "tpu_experiments/data/reading/turns.py",
        "if is_part and before is not None",
        "if False and is_part and before is not None",
        _READERS,
    ),
    Defect(
        "rows: pictures are only listed",
        "tpu_experiments/data/reading/formats.py",
        '        if meaning == "medium" and value',
        "        if False and value",
        _READERS,
    ),
    Defect(
        "rows: choices are only listed",
        "tpu_experiments/data/reading/formats.py",
        '        if is_chat and (meaning == "choices" or',
        "        if is_chat and (False or",
        _READERS,
    ),
    Defect(
        "rows: a refusal beside an answer is dropped",
        "tpu_experiments/data/reading/turns.py",
        '        if meaning == "refusal":',
        "        if False:",
        _READERS,
    ),
    Defect(
        "rows: fields inside turns are not listed",
        "tpu_experiments/data/reading/turns.py",
        '    unread.update(f"{path}.{name}" for name in record.unread)\n    return turn\n',
        "    return turn\n",
        _READERS,
    ),
    Defect(
        "rows: members of parts are not listed",
        "tpu_experiments/data/reading/turns.py",
        '    unread.update(f"{path}.{name}" for name in record.unread)\n    return _Part(',
        "    return _Part(",
        _READERS,
    ),
    Defect(
        "rows: a second field of one meaning counts as read",
        "tpu_experiments/data/reading/fields.py",
        "self.mark(*(own for own in given if self.fields[own] == value))",
        "self.mark(*given)",
        _READERS,
    ),
    Defect(
        "rows: an empty field is listed",
        "tpu_experiments/data/reading/fields.py",
        "if name not in self._read and not is_empty(value)",
        "if name not in self._read",
        _READERS,
    ),
    Defect(
        "rows: counts of blocks are not added up",
        "tpu_experiments/data/prepare.py",
        "        not_read.update(block.not_read)\n",
        "        not_read |= block.not_read\n",
        _READERS,
    ),
    Defect(
        "rows: a worker's counts go on from block to block",
        "tpu_experiments/data/steps/blocks.py",
        "        self.not_read = Counter()\n        refused",
        "        refused",
        _READERS,
    ),
    Defect(
        "rows: a plain answer gets the recipe's heading",
        "tpu_experiments/data/reading/formats.py",
        "for name in RECIPE) > 1",
        "for name in RECIPE) >= 0",
        _READERS,
    ),
    Defect(
        "rows: an empty instruction leaves blank lines",
        "tpu_experiments/data/reading/formats.py",
        "for text in (question, given) if text.strip())",
        "for text in (question, given))",
        _READERS,
    ),
    Defect(
        "rows: JSON text in a cell is not parsed",
        "tpu_experiments/data/reading/fields.py",
        '    if not isinstance(value, str) or not value.lstrip().startswith("["):\n',
        "    if True:\n",
        _READERS,
    ),
    Defect(
        "state: a resume begins with averages equal to the parameters",
        "tpu_experiments/checkpoint/state.py",
        """            slots[slot] = placed(OPTIMIZER, f"{name}/{slot}", slots[slot])
""",
        """            slots[slot] = placed(OPTIMIZER, f"{name}/{slot}", slots[slot])
        if LAG in slots:
            slots[LAG] = torch.zeros_like(slots[LAG])
""",
        "tests/training/test_resumed_state.py",
    ),
    Defect(
        "state: a fresh optimizer is reset again by a resume in mid-stage",
        "tpu_experiments/training/trainer.py",
        """            if stage.optimizer == "fresh" and stage.index > 0:
                self.state.update(""",
        """        if stage.optimizer == "fresh" and stage.index > 0:
            self.state.update(""",
        "tests/training/test_resumed_state.py",
    ),
    Defect(
        "state: torch's seed is the same at each step",
        "tpu_experiments/training/trainer.py",
        "seed_of(self.config.seed, self.progress.step, ",
        "seed_of(self.config.seed, 0, ",
        "tests/training/test_resumed_state.py",
    ),
    Defect(
        "state: torch's seed leaves out the step",
        "tpu_experiments/training/step.py",
        '{seed}/{step}/{rank}"',
        '{seed}/{rank}"',
        "tests/training/test_resumed_state.py",
    ),
    Defect(
        "state: a background save shares the live position",
        "tpu_experiments/checkpoint/state.py",
        "Snapshot(copy.deepcopy(progress), ",
        "Snapshot(progress, ",
        "tests/training/test_saver.py",
    ),
    Defect(
        "schedule: wsd's decay is rounded down",
        "tpu_experiments/optim/schedules.py",
        "math.ceil(schedule.decay_fraction * num_steps)",
        "int(schedule.decay_fraction * num_steps)",
        "tests/optim/test_schedules.py",
    ),
    Defect(
        "metrics: bits per byte count special tokens (the evaluation of a run)",
        "tpu_experiments/training/evaluation.py",
        "is_text = rows.segments_GT > 0 if self.widths is None else self.widths.is_text(rows.ids_GT)",
        "is_text = rows.segments_GT > 0",
        "tests/training/test_evaluate.py",
    ),
    Defect(
        "metrics: bits per byte count special tokens (every reader of widths)",
        "tpu_experiments/data/tokens/widths.py",
        "return self.bytes_V[ids] > 0",
        "return self.bytes_V[ids] >= 0",
        "tests/training/test_evaluate.py",
    ),
    Defect(
        "metrics: special tokens have bytes",
        "tpu_experiments/data/tokens/widths.py",
        '0 if added["special"] else ',
        "",
        "tests/training/test_evaluate.py",
    ),
    Defect(
        "traces: TensorBoard's files are named by the clock alone",
        "tpu_experiments/loggers/tensorboard.py",
        "begun = max([int(time.time()), *(1 + when for when in times)])",
        "begun = int(time.time())",
        "tests/loggers/test_tensorboard.py",
    ),
    Defect(
        "traces: what the last step has already is written again",
        "tpu_experiments/loggers/tensorboard.py",
        "new = [value for value in values if shown_as(step, value) not in self._shown]",
        "new = list(values)",
        "tests/loggers/test_tensorboard.py",
    ),
    Defect(
        "traces: a file that is being written is a leftover",
        "tpu_experiments/storage/paths.py",
        "fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "tests/storage/test_leftovers.py",
    ),
    Defect(
        "traces: a machine that came while it was deleted is free",
        "launch/tpu_vm/money.py",
        "if free_at is None or now - free_at < BOOT_SECONDS:",
        "if True:",
        "tests/launch/test_random_clouds.py",
    ),
    Defect(
        "traces: a bug while an error of the network is handled is the network's",
        "tpu_experiments/config/surroundings.py",
        "each = each.__cause__ or (",
        "each = each.__cause__ or each.__context__ or (",
        "tests/config/test_surroundings.py",
    ),
    Defect(
        "preferences: the pairs of a prompt are split by their answers",
        "tpu_experiments/data/cleaning/duplicates.py",
        'turns = (f"{role}\\x1f{_normal(content)}" for',
        "turns = (document.content for",
        "tests/data/test_pairs.py",
    ),
    Defect(
        "preferences: the rejected answer begins a token early",
        "tpu_experiments/data/tokens/tokenize.py",
        "flags[len(chosen.flags)] |= SECOND",
        "flags[len(chosen.flags) - 1] |= SECOND",
        "tests/data/test_pairs.py",
    ),
    Defect(
        "preferences: a prompt is cut by a token less than it has to be",
        "tpu_experiments/data/steps/pairs.py",
        "len(ids_L) - max_tokens",
        "len(ids_L) - max_tokens - 1",
        "tests/data/test_pairs.py",
    ),
    Defect(
        "preferences: the prompt of two conversations is a turn short",
        "tpu_experiments/data/reading/pairs.py",
        "return sides[0][:shared], sides[0][shared:], sides[1][shared:]",
        "return sides[0][: shared - 1], sides[0][shared - 1 :], sides[1][shared - 1 :]",
        "tests/data/reading/test_pairs.py",
    ),
    Defect(
        "preferences: the mean over tokens instead of the sum",
        "tpu_experiments/objectives/preference.py",
        "chosen_RP, rejected_RP = ratios_RP2.unbind(-1)",
        "chosen_RP, rejected_RP = (ratios_RP2 / pairs.lengths_RP2).unbind(-1)",
        "tests/objectives/test_pair_losses.py tests/objectives/test_preference.py",
    ),
    Defect(
        "preferences: the rejected answer is preferred",
        "tpu_experiments/objectives/preference.py",
        "margin_RP = beta * (chosen_RP - rejected_RP)",
        "margin_RP = beta * (rejected_RP - chosen_RP)",
        "tests/objectives/test_pair_losses.py tests/objectives/test_preference.py",
    ),
    Defect(
        "preferences: the smoothed side of robust has the wrong sign",
        "tpu_experiments/objectives/preference.py",
        "both_RP = (1 - smoothing) * F.logsigmoid(margin_RP) - smoothing",
        "both_RP = (1 - smoothing) * F.logsigmoid(margin_RP) + smoothing",
        "tests/objectives/test_pair_losses.py tests/objectives/test_preference.py",
    ),
    Defect(
        "preferences: the prompt is learnt as well",
        "tpu_experiments/objectives/preference.py",
        'logps_RP2 = by_segment(rows["segments"], -losses_RT * weights_RT).unflatten',
        'logps_RP2 = by_segment(rows["segments"], -losses_RT).unflatten',
        "tests/objectives/test_preference.py",
    ),
    Defect(
        "scores: the rejected answer is preferred",
        "tpu_experiments/objectives/reward.py",
        "differences_RP = chosen_RP - rejected_RP",
        "differences_RP = rejected_RP - chosen_RP",
        "tests/objectives/test_reward.py",
    ),
    Defect(
        "scores: the token before the last is scored",
        "tpu_experiments/models/families/classification.py",
        "last_RS1 = torch.where(own_RST, index_T, -1).amax(-1, keepdim=True)",
        "last_RS1 = torch.where(own_RST, index_T, -1).amax(-1, keepdim=True) - 1",
        "tests/objectives/test_reward.py",
    ),
    Defect(
        "scores: a token that pads is scored",
        "tpu_experiments/models/families/classification.py",
        "(segments_RT[:, None] == number_S1) & is_text_RT[:, None]",
        "segments_RT[:, None] == number_S1",
        "tests/objectives/test_reward.py",
    ),
    Defect(
        "preferences: a gradient of one for every token",
        "tpu_experiments/models/passes/token_losses.py",
        "(unit_BTH.float() * grad_BT[..., None])",
        "(unit_BTH.float())",
        "tests/models/test_token_losses.py",
    ),
    Defect(
        "preferences: an answer has the reference of the next one",
        "tpu_experiments/training/reference.py",
        "segment_L = segments_MT[row_L, column_L] - 1",
        "segment_L = segments_MT[row_L, column_L] % values_MS.shape[1]",
        "tests/training/test_reference.py",
    ),
    Defect(
        "preferences: the reference is not computed, and is 0",
        "tpu_experiments/training/reference.py",
        "return np.ascontiguousarray(whole[:, :",
        "return np.zeros_like(whole[:, :",
        "tests/training/test_stored_reference.py",
    ),
    Defect(
        "preferences: the stored reference of another base is taken",
        "tpu_experiments/training/reference.py",
        "if computed.runtime.any_process(not is_same):",
        "if computed.runtime.any_process(False):",
        "tests/training/test_stored_reference.py",
    ),
    Defect(
        "preferences: the reference that a checkpoint names is not verified",
        "tpu_experiments/training/reference.py",
        "if hashlib.sha256(data).hexdigest() != sha256:",
        "if not data:",
        "tests/training/test_stored_reference.py",
    ),
    Defect(
        "preferences: a warm start has the file of its base",
        "tpu_experiments/training/reference.py",
        "None if point is None else point.sha256",
        "None",
        "tests/training/test_stored_reference.py",
    ),
    Defect(
        "preferences: sums that are scattered are no collective that rounds",
        "tpu_experiments/planning/orders.py",
        'COMBINING = ("all-reduce", "reduce-scatter")',
        'COMBINING = ("all-reduce",)',
        "tests/planning/test_orders.py",
    ),
    Defect(
        "prompts: one that is trained on is held out too",
        "tpu_experiments/data/prompts.py",
        "train = [prompt for key, prompt in own.items() if key not in shared]",
        "train = list(own.values())",
        "tests/data/test_prompts.py",
    ),
    Defect(
        "prompts: the first token of the answer is given away",
        "tpu_experiments/data/prompts.py",
        "(tokens.flags & LEARN)[0])].tolist()",
        "(tokens.flags & LEARN)[0]) + 1].tolist()",
        "tests/data/test_prompts.py",
    ),
    Defect(
        "prompts: a question without an answer is split by another hash",
        "tpu_experiments/data/prompts.py",
        "key = prompt_key if self.source.split_by == FIRST_TURN else content_key",
        "key = content_key",
        "tests/data/test_prompts.py",
    ),
    Defect(
        "prompts: a damaged file is read",
        "tpu_experiments/data/prompts.py",
        "        require_seal(content, path=path)\n",
        "",
        "tests/data/test_prompts.py",
    ),
    Defect(
        "rollouts: the last token of a prompt is learnt",
        "tpu_experiments/training/rollouts.py",
        "(column_T >= self.prompt_lengths_N[:, None])",
        "(column_T >= self.prompt_lengths_N[:, None] - 1)",
        "tests/training/test_rollouts.py",
    ),
    Defect(
        "rollouts: another file than the checkpoint names is learnt",
        "tpu_experiments/training/rollouts.py",
        "if sha256 is not None and found != sha256:",
        "if False:",
        "tests/training/test_rollouts.py",
    ),
    Defect(
        "rollouts: an answer has the advantage of another",
        "tpu_experiments/training/rl.py",
        "advantage_N=own.values_N,",
        "advantage_N=own.values_N[::-1].copy(),",
        "tests/training/test_rl.py",
    ),
    Defect(
        "rollouts: every step of an iteration has its first rows",
        "tpu_experiments/training/rl.py",
        "slice((step - self.first) * global_rows, (step - self.first + 1) * global_rows)",
        "slice(0, global_rows)",
        "tests/training/test_rl.py",
    ),
    Defect(
        "rollouts: the start of a run is the model as it is now",
        "tpu_experiments/training/rl.py",
        "start = {name: place(stacked(host, name).clone(), name=name) for name in self.parameters}",
        "start = self.parameters",
        "tests/training/test_rl.py",
    ),
    Defect(
        "rollouts: the first behind a rollback stays",
        "tpu_experiments/training/rollouts.py",
        "if number > iteration:",
        "if number > iteration + 1:",
        "tests/training/test_rollouts.py",
    ),
    Defect(
        "rollouts: rows have no room for an answer",
        "tpu_experiments/config/defaults.py",
        "longest = None if prompt is None else prompt + config.rollout.max_new_tokens",
        "longest = prompt",
        "tests/config/test_rollout.py",
    ),
)


def copied(folder: Path) -> Path:
    """Copy the tracked files; the tests read shared data where the original's would."""
    target = folder / "main"
    shutil.rmtree(target, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    for name in names.rstrip("\0").split("\0"):
        if (REPOSITORY / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)
    # A checkout: the launcher's tests send one, and would fail of every defect elsewhere.
    git = ["git", "-c", "user.name=mutations", "-c", "user.email=mutations@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "tracked files"]):
        subprocess.run([*git, *words], cwd=target, check=True, capture_output=True)
    return target


def finder(defect: Defect, *, tree: Path) -> str | None:
    """Name the first test that fails with the defect in place; the file is as before afterwards."""
    file = tree / defect.file
    text = file.read_text(encoding="utf-8")
    if text.count(defect.old) != 1:
        raise SystemExit(f"{defect.file} has {text.count(defect.old)} times {defect.old!r}; mend this list")
    tests = [name for name in dict.fromkeys(defect.tests.split()) if (tree / name).exists()]
    if not tests:  # without a name pytest would run all
        raise SystemExit(f"none of {defect.tests} is a tracked file; mend this list")
    file.write_text(text.replace(defect.old, defect.new), encoding="utf-8")
    # A defect may make a test wait without end, which the limit of time finds.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--timeout=120", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    finally:
        file.write_text(text, encoding="utf-8")
    found = FAILED.search(done.stdout)
    return found[1] if found and done.returncode else None


def main() -> None:
    output, *words = sys.argv[1:]
    tree = copied(Path(output).resolve())
    chosen = [defect for defect in DEFECTS if not words or any(word in defect.what for word in words)]
    print("| defect | in | found by |\n| --- | --- | --- |")
    missed = 0
    for defect in chosen:
        found = finder(defect, tree=tree)
        missed += found is None
        print(f"| {defect.what} | `{defect.file}` | {f'`{found}`' if found else 'NOT FOUND'} |", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
