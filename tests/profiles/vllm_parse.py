"""Run by the target's interpreter: parses argument lists with vLLM's own parser, as JSON in and out.

Reads {"name": [words]} from its input and prints {"name": {option: text of its value}}.
"""

import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parsed = {}
for name, words in json.load(sys.stdin).items():
    found = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(words))
    parsed[name] = {option: repr(value) for option, value in sorted(found.items()) if option != "config"}
print(json.dumps(parsed))
