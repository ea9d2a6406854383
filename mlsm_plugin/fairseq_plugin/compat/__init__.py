"""All code that uses parts of fairseq that fairseq does not promise to keep.

Each line names a module, the parts of fairseq, and the purpose. ``tests/fairseq_plugin/compat/compat_checks.py`` has a
check for each.

- ``batches``: how masks look up words and draw symbols, which samples ``batch_by_size`` drops, and the iterators of the
  trainer; long words are cut, every sample is in a batch, and all batches of an update are known before its first step.
- ``binarized_files``: the format of a binarized split, the fields of its builder, and where blocks begin; a split is
  checked before fairseq maps it, and written with little memory.
- ``checkpoint_averaging``: where a checkpoint has its weights, vocabulary and optimizer; the mean of several
  checkpoints.
- ``checkpoint_contents``: the registries of names and options, and the content of a checkpoint; it is checked first.
- ``checkpoint_states``: the content of a checkpoint, and the functions that load it; all checkpoints are loaded here.
- ``compiled_steps``: torch's private mark of a compiled module; fairseq's ``masked_lm`` in a compiled step.
- ``installation``: the names of the two distributions and of the compiled modules; problems are reported before an
  import.
- ``loading_hooks``: torch's private hook before weights are loaded, how the trainer loads a checkpoint, and the
  function behind all loading; a checkpoint that does not fit fails in one line, and all ranks can resume.
- ``model_parts``: the modules of a RoBERTa and its LM head, the keys of its output, the options that a model's class
  declares, the names of weights, the interface of a loaded model, and beam search.
- ``rank_gather``: the collective operations; negatives, keys and counts of all ranks.
- ``resumed_runs``: saving, copying and loading checkpoints, and when to stop; a killed run ends like one that never
  stopped.
- ``training_options``: how ``fairseq-train`` reads its options and begins, and where it needs a GPU in a run on the
  CPU; impossible options fail in one line.
- ``training_progress``: the class that prints the log, and the meters; a training that a command of this package
  started has a bar, or prints a line every 20 seconds.
- ``version_shims``: differences between versions of fairseq, torch and numpy, and fairseq's reports of errors.
"""
