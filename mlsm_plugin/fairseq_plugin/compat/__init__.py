"""Everything that touches what fairseq does not promise to keep.

A line for each module: what of fairseq, and why. ``tests/fairseq_plugin/compat/compat_checks.py`` has a check for each.

- ``batches``: how masks look for words and draw symbols, which samples ``batch_by_size`` leaves out, and the iterators
  of the trainer; long words are cut, every sample is in a batch, and the batches of an update are known before the
  first.
- ``binarized_files``: the format of a binarized split, the fields of its builder, and where blocks begin; a split is
  checked before fairseq maps it, and written with little memory.
- ``checkpoint_averaging``: where a checkpoint has its weights, vocabulary and optimizer; the mean of several.
- ``checkpoint_contents``: the registries of names and options, and what a checkpoint holds; what is refused.
- ``checkpoint_states``: what is in a checkpoint, and the functions that load it; all checkpoints are loaded here.
- ``compiled_steps``: torch's private mark of a compiled module; fairseq's ``masked_lm`` as a compiled step needs it.
- ``installation``: the names of the two distributions and of the compiled modules; what is wrong before an import.
- ``loading_hooks``: torch's private hook before weights are loaded, how the trainer loads a checkpoint, and what
  all loading goes through; what does not fit is refused in one line, and all ranks can resume.
- ``model_parts``: the modules of a RoBERTa and its LM head, the keys of its output, the options that a model's class
  declares, the names of weights, the interface of a loaded model, and beam search.
- ``rank_gather``: the collective operations; negatives, keys and counts of all ranks.
- ``resumed_runs``: saving, copying and loading checkpoints, and when to stop; a killed run ends as one never stopped.
- ``training_options``: how ``fairseq-train`` reads its options and begins, and where it asks for a GPU in a run on the
  CPU; what it cannot do is one line.
- ``training_progress``: the class of the log lines, what it is told of a run, and the meters; a training that a command
  of this package started has a bar, or a line every 20 seconds.
- ``version_shims``: differences between versions of fairseq, torch and numpy, and what it says of itself.
"""
