"""What the machine cannot do, or not with this task."""

from tpu_experiments.config.schema import Config

CHIPS_OF_A_HOST, CHIPS_OF_A_V4_OR_V5P_HOST = 8, 4
"""The most that one v5e or v6e machine has, and one of v4 or v5p, whose slices are named after their cores."""
NEED_ONE_HOST = ("resume_check", "evaluate", "generate")


def hardware_problems(config: Config) -> list[str]:
    """Return incompatible settings of `hw`, by themselves and with the task."""
    hw = config.hw
    problems = _block(hw.attention_block)
    if hw.runtime == "xla" and hw.device == "cuda":
        problems.append("hw.runtime=xla with hw.device=cuda; torch_xla 2.9 has no CUDA device; use hw.runtime=eager.")
    if hw.runtime == "eager" and hw.device == "tpu":
        problems.append("hw.runtime=eager with hw.device=tpu; plain torch cannot use a TPU; use hw.runtime=xla.")
    if hw.runtime == "eager" and hw.parallel == "spmd":
        problems.append("hw.parallel=spmd with hw.runtime=eager; plain torch has no SPMD; use hw.parallel=spawn.")
    if hw.parallel == "inline" and hw.num_devices != 1:
        problems.append(
            f"hw.num_devices={hw.num_devices} with hw.parallel=inline; inline uses one device; use hw.parallel=spmd, "
            "or hw.num_devices=1."
        )
    if hw.parallel == "spawn" and hw.runtime == "xla" and hw.device == "cpu" and hw.num_devices != 1:
        problems.append(
            f"hw.num_devices={hw.num_devices} with hw.parallel=spawn on torch_xla's CPU device; it has no collectives "
            "between processes; use hw.parallel=spmd, or hw.runtime=eager, which uses gloo."
        )
    if "://" in hw.compile_cache:
        problems.append(
            f"hw.compile_cache={hw.compile_cache}; torch_xla reads and writes files of this machine only; name a local "
            "folder, or use hw.compile_cache=none."
        )
    return problems + _hosts(config)


def _hosts(config: Config) -> list[str]:
    """Return what several hosts cannot run."""
    hw, problems = config.hw, []
    has_two_cores = hw.chip is not None and hw.chip.name in ("v4", "v5p")
    most = CHIPS_OF_A_V4_OR_V5P_HOST if has_two_cores else CHIPS_OF_A_HOST
    if hw.device == "tpu" and hw.num_devices > most * hw.num_hosts:
        kind = "v4 or v5p has 4 chips (two cores each, which are one device)" if has_two_cores else None
        problems.append(
            f"hw.num_devices={hw.num_devices} with hw.num_hosts={hw.num_hosts}; a host of "
            f"{kind or f'v5e or v6e has at most {CHIPS_OF_A_HOST} chips'}; write how many hosts there are, or use "
            f"{f'hw={hw.name} as it is' if has_two_cores else 'hw=v5e16 or hw=v6e16'}."
        )
    if hw.num_hosts <= 1:
        return problems
    if hw.num_devices % hw.num_hosts:
        problems.append(
            f"hw.num_hosts={hw.num_hosts} with hw.num_devices={hw.num_devices}; every host has as many devices; choose "
            "a multiple."
        )
    if hw.runtime != "xla" or hw.parallel != "spmd":
        problems.append(
            f"hw.num_hosts={hw.num_hosts} with hw.runtime={hw.runtime} hw.parallel={hw.parallel}; several hosts are "
            "one process each; use hw.runtime=xla hw.parallel=spmd."
        )
    if config.task.name in NEED_ONE_HOST:
        problems.append(
            f"hw.num_hosts={hw.num_hosts} with task={config.task.name}; it runs on one host; use hw=v5e8 or hw=v6e8."
        )
    return problems


def _block(tokens: int) -> list[str]:
    below = tokens // 128 * 128
    if tokens == below:
        return []
    return [
        f"hw.attention_block={tokens}; the kernel's blocks are multiples of 128 tokens; use {below} or {below + 128}."
    ]
