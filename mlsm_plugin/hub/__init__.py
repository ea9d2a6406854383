"""Load a trained model from a folder and use it."""

from mlsm_plugin.files.model_files import checkpoint_of
from mlsm_plugin.hub.infilling import DenoisingHubInterface
from mlsm_plugin.hub.interface import MlsmHubInterface, TokenProperties
from mlsm_plugin.hub.loading import from_pretrained

__all__ = ["DenoisingHubInterface", "MlsmHubInterface", "TokenProperties", "checkpoint_of", "from_pretrained"]
