"""``python -m reference_impl train | evaluate [CONFIG.yaml] [key=value …]``, alone or under torchrun."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence

from reference_impl.config import describe_options, read_config
from reference_impl.errors import PeerError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. 0: done, 1: a rank failed, 2: something cannot be used as asked, 75: stopped early, and can go on.

    Rank 0 says on stderr which and why.
    """
    parser = argparse.ArgumentParser(
        prog="python -m reference_impl",
        description="Fine-tune a reranker with FSDP2; train resumes from its newest checkpoint by itself.",
        epilog="options, as key: value in the YAML file or key=value here, with their defaults:\n" + describe_options(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("train", "evaluate"))
    parser.add_argument("settings", nargs="*", metavar="CONFIG.yaml | key=value", help="a YAML file first, then overrides")
    given = parser.parse_args(arguments)
    path = given.settings[0] if given.settings and "=" not in given.settings[0] else None
    try:
        config = read_config(path, given.settings[1:] if path else given.settings)
        # Importing torch and transformers takes seconds; a misspelt option should not.
        from reference_impl.run import evaluate_newest, train

        result = train(config) if given.command == "train" else evaluate_newest(config)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"reference_impl: {error}", file=sys.stderr)
        return 2
    except PeerError as error:
        if error.__cause__ is not None:  # on the ranks where it happened
            traceback.print_exception(error.__cause__)
        if os.environ.get("RANK", "0") == "0":
            print(f"reference_impl: {error}\nwhat was published before stays; resume with the same command", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result))
    return os.EX_TEMPFAIL if result.get("stopped") else 0


# DCP's writer process imports this module again under another name; only the command itself may run.
if __name__ == "__main__":
    sys.exit(main())
