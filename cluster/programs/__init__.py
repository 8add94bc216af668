"""Where programs come from: Go modules, wheels and packages of Debian."""
