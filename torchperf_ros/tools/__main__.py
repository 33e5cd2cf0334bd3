"""`python -m torchperf_ros.tools` is `torchperf`."""

import sys


def main() -> None:
    """Run the command; one that is stopped before it is there is no traceback either."""
    try:
        from torchperf_ros.tools.main import app

        app()
    except KeyboardInterrupt:
        sys.stderr.write("torchperf: stopped by SIGINT\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
