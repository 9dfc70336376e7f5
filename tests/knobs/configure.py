"""Run by the target's interpreter: the configuration that vLLM makes of argument lists; no engine starts.

Reads {"name": [words]} and, as first argument, a JSON list of dotted paths; prints {"name": {path: value}}.
"""

import json
import sys
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser


def plain(value: Any) -> Any:
    """A value as JSON: enumerations by value, a speculative configuration by what was asked of it."""
    if hasattr(value, "num_speculative_tokens"):
        return {"method": value.method, "num_speculative_tokens": value.num_speculative_tokens}
    value = getattr(value, "value", value)
    return value if isinstance(value, (bool, int, float, str, list)) or value is None else str(value)


told: dict[str, dict[str, Any]] = {}
for name, words in json.load(sys.stdin).items():
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    made = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    told[name] = {}
    for path in json.loads(sys.argv[1]):
        value: Any = made
        for key in path.split("."):
            value = getattr(value, key, None)
        told[name][path] = plain(value)
print(json.dumps(told))
