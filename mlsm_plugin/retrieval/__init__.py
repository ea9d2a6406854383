"""NPM inference: datastore, search, phrase filling, zero-shot classification."""

from typing import TYPE_CHECKING

from mlsm_plugin.retrieval.settings import DatastoreSettings

if TYPE_CHECKING:
    from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore
else:

    def __getattr__(name: str) -> object:
        """Import the datastore when it is first used, since the help of a command only needs the settings."""
        if name == "PhraseDatastore":
            from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore

            return PhraseDatastore
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["DatastoreSettings", "PhraseDatastore"]
