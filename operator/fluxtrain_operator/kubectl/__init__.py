"""``kubectl fluxtrain``: what a job does or waits for, read from its objects; a plugin of kubectl.

It reads the cluster by calling kubectl, not a client library. So every kubeconfig works as in kubectl:
contexts, credential plugins, proxies, impersonation. exec and logs need no second implementation of their
protocols, and the plugin runs with the wheel's two basic dependencies alone. The price is about 0.2 s a call;
calls for several pods run at a time.
"""

from fluxtrain.runtime import program


def run() -> int:
    """Run the plugin with the arguments of the process; return its exit code."""

    def run_command() -> int:
        from fluxtrain_operator.kubectl.main import main  # imports for half a second

        return main()

    program.use_utf8()
    return program.run("kubectl fluxtrain", "operator", run_command)


def complete() -> int:
    """Print what may come next in the words of the process, as kubectl's completion reads it."""

    def run_command() -> int:
        from fluxtrain_operator.kubectl.main import complete

        return complete()

    return program.run("kubectl_complete-fluxtrain", "operator", run_command)
