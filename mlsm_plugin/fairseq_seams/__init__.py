"""Everything that touches what fairseq does not promise to keep.

A line for each module: what of fairseq, and why. ``tests/fairseq_seams/seam_checks.py`` has a check for each of them.

- ``beam_search``: the generator of a task and the keys of its hypotheses; a denoising model fills gaps with it.
- ``binarized_files``: the format of the index of a binarized split; it is checked before fairseq maps the data.
- ``checkpoint_averaging``: where a checkpoint has its weights, vocabulary and optimizer; the mean of several.
- ``checkpoint_contents``: the registries of names and options, and what a checkpoint holds; what is refused.
- ``checkpoint_states``: what is in a checkpoint, and the functions that load it; the one door to all checkpoints.
- ``cpu_runs``: where it asks for a GPU in a run on the CPU, and which precision it lacks there.
- ``installation``: the names of the two distributions and of the compiled modules; what is wrong before an import.
- ``loading_hooks``: torch's private hook before weights are loaded, how the trainer loads a checkpoint, and what
  all loading goes through; what does not fit is refused in one line, and all ranks can resume.
- ``masked_lm_batches``: the datasets inside those of ``masked_lm``; batches get codes, and other masks.
- ``masked_lm_samples``: the private method that gives ``masked_lm`` its samples; long sentences are cut.
- ``mmap_builder``: the fields of the builder of binarized datasets; its memory must not grow with the text.
- ``model_options``: the options that a model's class declares; fine-tuning rebuilds the architecture of a checkpoint.
- ``quiet_start``: what fairseq says of itself at the start of a run; its users read about their own doing.
- ``rank_gather``: the collective operations; negatives, keys and counts of all ranks.
- ``resumed_runs``: saving, copying and loading checkpoints, and when to stop; a killed run ends as one never stopped.
- ``roberta_head``: the parts of the LM head; a second projection shares its transform.
- ``roberta_hub``: what the interface of a loaded model holds; ours extends it.
- ``roberta_parts``: the modules of a RoBERTa and the keys of its output; hidden states of any layer.
- ``token_slices``: where blocks and combined splits begin; tokens keep their place in the corpus.
- ``training_options``: how ``fairseq-train`` reads its options and begins; what it cannot do is one line.
- ``update_lookahead``: the iterators of the trainer; all batches of an update are known before the first.
- ``version_shims``: differences between versions of fairseq, torch and numpy.
- ``weight_names``: the names of weights in a checkpoint; export, and growing or shrinking a vocabulary.
- ``whole_epochs``: which samples ``batch_by_size`` leaves out; small datasets keep their last batch; samples that
  fairseq keeps beyond their epoch.
"""
