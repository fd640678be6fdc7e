"""`python -m rolljax.export` runs `rolljax.commands.export`. Import that module; `rolljax.export` is the function."""

if __name__ == "__main__":
    import sys

    from rolljax.commands.export import main

    sys.exit(main())
if __name__ != "__mp_main__":  # a worker process of `multiprocessing` reads the main module again
    raise ImportError("rolljax.export is a function; the command is rolljax.commands.export")
