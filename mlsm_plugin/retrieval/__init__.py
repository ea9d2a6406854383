"""NPM inference: datastore, search, phrase filling, zero-shot classification."""

from mlsm_plugin.retrieval.phrase_datastore import DatastoreSettings, PhraseDatastore

__all__ = ["DatastoreSettings", "PhraseDatastore"]
