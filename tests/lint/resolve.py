"""Run by the target's interpreter: what configuration vLLM makes of argument lists; no engine starts.

Reads {"name": [words]} from standard input; prints {"name": the configuration as text, or {"error": why}}.
"""

import json
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

told: dict[str, object] = {}
for name, words in json.load(sys.stdin).items():
    try:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        made = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        made.instance_id = ""
        made.parallel_config._data_parallel_master_port_list = []
        told[name] = "\n".join(f"{part} {getattr(made, part)!r}" for part in sorted(vars(made)))
    except (Exception, SystemExit) as error:
        told[name] = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(told))
