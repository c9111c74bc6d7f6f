"""Picture of a run from its folder, as TensorBoard's IMAGES tab has it.

python -m tests.benchmarks.plot_run outputs/<name> --out tests/benchmarks/main_job.png
"""

import argparse
import json
from pathlib import Path

from tpu_experiments.loggers.jsonl import METRICS_FILE, read_records
from tpu_experiments.training.pictures import audit_figure, loss_figure, png_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--audit", action="store_true", help="its data instead of its losses")
    args = parser.parse_args()
    if args.audit:
        audit = json.loads((args.run / "audit.json").read_text(encoding="utf-8"))
        figure = audit_figure(audit["sources"])
    else:
        result = json.loads((args.run / "result.json").read_text(encoding="utf-8"))
        stages = {stage["name"]: stage["steps"] for stage in result["stages"]}
        title = f"{args.run.name}: held-out loss {result['eval_loss_before']:.4f} -> {result['eval_loss']:.4f}"
        figure = loss_figure(read_records(str(args.run / METRICS_FILE)), stages=stages, title=title)
    args.out.write_bytes(png_of(figure))


if __name__ == "__main__":
    main()
