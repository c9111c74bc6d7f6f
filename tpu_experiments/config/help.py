"""The text of `--help`, from the folders of conf/ alone: Hydra's own takes two seconds to list the same groups."""

from pathlib import Path

CONF = Path(__file__).parents[2] / "conf"

GROUPS = {
    "task": "what the command does",
    "model": "what is trained",
    "data": "what it is trained on; one or several: data=[a,b]",
    "hw": "the machine; changes the speed, never the mathematics",
    "curriculum": "stages, in order",
    "lora": "adapters; none trains every weight",
    "optim": "optimizer",
    "schedule": "learning rate over a stage",
    "sharding": "what is split over the devices",
    "trainer": "the training loop",
    "logger": "where metrics go; one or several",
    "experiment": "a whole recipe: model, data, hw and settings",
    "sweep": "many runs, one after the other",
    "debug": "laid over anything else, to try it out first",
    "local": "settings of this machine, conf/local/default.yaml",
}

HEADER = """\
Fine-tune and pre-train language models on TPUs with torch_xla; the same command runs on this machine's CPU.

  python run.py [GROUP=CHOICE ...] [KEY=VALUE ...]

Without arguments it trains an adapter for a tiny model that has read Romanian stories, here, in a minute and a half:
it learns to answer questions about a story, and is asked 120 held-out ones before and after.

Groups and their choices (the files of conf/GROUP):
"""

FOOTER = """
Examples:
  python run.py                                                     # the shipped stories, on this machine's CPU
  python run.py model=mistral7b data=[wiki_ro,ultrachat_ro] hw=v6e8 # two data sets, on a TPU v6e-8
  python run.py experiment=mistral7b_ro debug=smoke                 # try a recipe: tiny model, shipped samples, CPU
  python run.py data=wiki_ro data.wiki_ro.path=/data/articles.jsonl # a file of your own in the same format
  python run.py -m lora.r=8,16,32 lora.alpha=16,32                  # a sweep: one run per combination

See the config without running anything: add `--cfg job --resolve`; one part of it: `--package optim`.
Every key with its unit and meaning:
  tpu_experiments/config/{schema,sources,stages,hardware,preparing,guarding,checkpointing,sweeping}.py, of tasks
  tpu_experiments/config/{planning,evaluating,generating,reporting,resuming,doctoring}.py.
A value with commas, brackets or = in it needs quotes for the shell and for Hydra: 'sample.prompt="Salut, lume"'.

A run lives in OUTPUT_DIR/NAME (outputs/<model>_<data>_<hw>, or name=...). The same name and config go on where the
run stopped; the same name with another config is refused.

Exit codes:
   0  finished
   1  failed; the message and the log say why; of task=resume_check: the resumed run differs; of task=doctor: training
      would not start; of a sweep: a point failed
   2  refused: something in the command, the config or the data; nothing was run or written
  75  stopped on request (Ctrl-C, SIGTERM, preemption) after a checkpoint; the same command goes on

--hydra-help lists Hydra's own flags.
"""


def choices(group: str) -> list[str]:
    """Return the names of the files in conf/<group>; empty if there is no such group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def help_text() -> str:
    """Return the text of `--help`."""
    width = max(map(len, GROUPS)) + 2
    lines = []
    for group, meaning in GROUPS.items():
        lines.append(f"  {group:<{width}}{meaning}")
        if choices(group):
            lines.append(f"  {'':<{width}}  {', '.join(choices(group))}")
    return HEADER + "\n".join(lines) + "\n" + FOOTER
