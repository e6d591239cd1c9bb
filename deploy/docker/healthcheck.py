"""The image's health check: it exits with 0 while the server accepts requests, and with 1 otherwise.

``HEALTH_URL`` names another address, for example for a server with TLS or on another port.
"""

import os
import sys
import urllib.request

URL = "http://127.0.0.1:8000/health/ready"
TIMEOUT_SECONDS = 4.0


def main() -> int:
    """Ask once; what is wrong goes to the container's health log."""
    url = os.environ.get("HEALTH_URL", URL)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            return 0 if answer.status == 200 else 1
    except (OSError, ValueError) as error:  # HTTP errors such as 503 are OSErrors too
        print(f"{url}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
