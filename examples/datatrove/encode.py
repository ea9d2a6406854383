"""Code a corpus with ``mlsm encode`` in the tasks of datatrove's local executor: one YAML file says what and how."""

import argparse
from pathlib import Path

import yaml
from datatrove.executor import LocalPipelineExecutor

from mlsm_plugin.cli.datatrove_step import EncodeCorpus


def main() -> None:
    """Run the tasks that are not complete yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Path, help="YAML file, such as examples/datatrove/encode.yaml")
    settings = yaml.safe_load(parser.parse_args().settings.read_text(encoding="utf-8"))
    words = [str(word) for word in settings["encode"]]
    # SlurmPipelineExecutor and RayPipelineExecutor take the same pipeline, tasks and logging_dir
    LocalPipelineExecutor([EncodeCorpus(*words)], **settings["executor"]).run()


if __name__ == "__main__":
    main()
