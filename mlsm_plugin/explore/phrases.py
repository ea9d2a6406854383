"""Phrases from a datastore for the masks of a text; needs fairseq and an NPM checkpoint."""

from typing import TYPE_CHECKING

from mlsm_plugin.core.files.atomic_files import PathLike
from mlsm_plugin.core.machine.devices import Device, default_device

if TYPE_CHECKING:
    from mlsm_plugin.retrieval.phrase_filling import PhraseCandidate


class Phrases:
    """A datastore and the checkpoint that made it; ValueError if another checkpoint made it."""

    def __init__(self, checkpoint: PathLike, datastore: PathLike, *, device: Device = None) -> None:
        from mlsm_plugin.hub import checkpoint_of, from_pretrained
        from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore
        from mlsm_plugin.retrieval.phrase_filling import PhraseFiller

        path = checkpoint_of(checkpoint)
        store = PhraseDatastore(datastore)
        store.check_belongs_to(path)
        interface = from_pretrained(path)
        interface.to(default_device(device))
        self._filler = PhraseFiller(interface, store)

    def of_masks(self, text: str, count: int = 5) -> "list[list[PhraseCandidate]]":
        """The best phrases for each ``<mask>``, with their sources; ValueError as for :meth:`.PhraseFiller.encode`."""
        return self._filler.fill(text, topk=count)
