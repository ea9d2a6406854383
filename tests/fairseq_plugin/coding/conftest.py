"""Import transformers as the package does, before the tests import it."""

from mlsm_plugin.core.files.hf_files import import_transformers

import_transformers()
