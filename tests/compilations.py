"""The programs that JAX compiles while a test looks."""

import threading

import jax


def compiled_from_now_on(*, ahead=False):
    """Return a list that receives the name of every program that is compiled from now on, in any thread.

    ahead: also those that a run compiles ahead (`aot.ahead`): their threads may outlive a run that a test has stopped.
    """
    names = []

    def listen(event, _, fun_name="", **__):
        of_run = threading.current_thread().name.startswith("rolljax-compile")
        if event == "/jax/core/compile/backend_compile_duration" and (ahead or not of_run):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return names
