"""NPM inference: datastore, search, phrase filling, zero-shot classification."""

from typing import Any

from mlsm_plugin.retrieval.settings import DatastoreSettings

__all__ = ["DatastoreSettings", "PhraseDatastore"]


def __getattr__(name: str) -> Any:
    """Import the datastore when it is first used: the help of a command needs the settings only."""
    if name == "PhraseDatastore":
        from mlsm_plugin.retrieval.phrase_datastore import PhraseDatastore

        return PhraseDatastore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
