"""What the machine cannot do, or not with this task."""

from tpu_experiments.config.schema import Config

CHIPS_OF_A_HOST = 8  # the most that one v5e or v6e machine has
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
    if hw.device == "tpu" and hw.num_devices > CHIPS_OF_A_HOST * hw.num_hosts:
        problems.append(
            f"hw.num_devices={hw.num_devices} with hw.num_hosts={hw.num_hosts}; a host of v5e or v6e has at most "
            f"{CHIPS_OF_A_HOST} chips; write how many hosts there are, or use hw=v5e16 or hw=v6e16."
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
