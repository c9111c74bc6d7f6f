"""Run a command from a checkout: `python run.py` is what `tpu-experiments` is where the package is installed."""

from tpu_experiments.command_line import main

if __name__ == "__main__":
    main()
