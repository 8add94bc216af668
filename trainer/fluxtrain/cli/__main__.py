"""``python -m fluxtrain.cli``."""

import sys

from fluxtrain.cli import main

sys.exit(main())
