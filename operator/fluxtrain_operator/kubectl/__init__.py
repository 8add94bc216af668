"""``kubectl fluxtrain``: what a job does or waits for, read from its objects; a plugin of kubectl.

It reads the cluster by calling kubectl, not a client library. So every kubeconfig works as in kubectl:
contexts, credential plugins, proxies, impersonation. exec and logs need no second implementation of their
protocols, and the plugin runs with the wheel's two basic dependencies alone. The price is about 0.2 s a call;
calls for several pods run at a time.
"""
