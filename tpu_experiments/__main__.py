"""Run a command of an installed package: `python -m tpu_experiments`."""

from tpu_experiments.command_line import main

if __name__ == "__main__":
    main()
