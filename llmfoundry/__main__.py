"""`python -m llmfoundry` is the console command `llmfoundry`."""

from llmfoundry.cli import main

if __name__ == "__main__":
    main()
