"""Code a corpus or index documents in the tasks of datatrove's local executor: one YAML file says what and how."""

import argparse
from pathlib import Path

import yaml
from datatrove.executor import LocalPipelineExecutor

from mlsm_plugin.cli.datatrove_step import EncodeCorpus, IndexDocuments

STEPS = {"encode": EncodeCorpus, "index": IndexDocuments}


def main() -> None:
    """Run the tasks that are not complete yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Path, help="YAML file, such as examples/datatrove/encode.yaml")
    settings = yaml.safe_load(parser.parse_args().settings.read_text(encoding="utf-8"))
    pipeline = [step(*map(str, settings[name])) for name, step in STEPS.items() if name in settings]
    # SlurmPipelineExecutor and RayPipelineExecutor take the same pipeline, tasks and logging_dir
    LocalPipelineExecutor(pipeline, **settings["executor"]).run()


if __name__ == "__main__":
    main()
