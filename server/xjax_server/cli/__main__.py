"""`python -m xjax_server.cli`, for where the script `xjax` is not on the path."""

import sys

from xjax_server.cli.app import main

sys.exit(main())
