"""`python -m tomoe` is `tomoe`."""

from tomoe.cli import main

if __name__ == "__main__":
    main()
