"""Makes Python on Linux look like Python on macOS.

    python tests/darwin/fake_darwin.py

installs it into the current environment, for all processes with FAKE_DARWIN=1. It covers the
platform's name, Linux-only functions, files and packages, the process start method and the limit of
open files. It does not emulate Metal, kqueue, BSD tools or case-insensitive file systems.
"""

import os
import sys

LINUX_ONLY = {
    "os": (
        "sched_getaffinity sched_setaffinity memfd_create O_TMPFILE O_PATH O_DIRECT pipe2 "
        "posix_fallocate posix_fadvise fdatasync eventfd copy_file_range splice getrandom "
        "pidfd_open getxattr setxattr listxattr removexattr getresuid getresgid setresuid "
        "setresgid waitid"
    ),
    "select": "epoll EPOLLIN EPOLLOUT",
    "signal": (
        "sigtimedwait sigwaitinfo pidfd_send_signal SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT "
        "SIGPOLL SIGCLD"
    ),
    "resource": "prlimit RLIMIT_RTPRIO RLIMIT_SIGPENDING RUSAGE_THREAD",
    "socket": (
        "AF_NETLINK AF_PACKET SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK TCP_QUICKACK "
        "TCP_USER_TIMEOUT TCP_KEEPIDLE"
    ),
    "fcntl": "F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_GET_SEALS F_OFD_SETLK",
    "time": "CLOCK_BOOTTIME CLOCK_TAI",
}
BUILTIN = {"os": "posix", "socket": "_socket", "signal": "_signal"}
"""The C modules behind some of them."""
LINUX_PACKAGES = ("mlx-cpu", "scipy-openblas32")
HIDDEN = ("/proc", "/sys", "/dev/full", "/dev/shm")
OPEN_FILES = 256
"""The default of `ulimit -n` in a new terminal."""


def apply():
    """Patches this process. Call it once, before any other import."""
    if sys.platform == "darwin":
        return
    import sysconfig

    sysconfig.get_config_vars()  # cached now; its source file has Linux in its name
    sys.platform = "darwin"
    name_system()
    remove_names()
    hide_files()
    hide_packages()
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))


def name_system():
    """Reports macOS 15.6 on Apple silicon."""
    import platform

    names = ("Darwin", "mac.local", "24.6.0", "Darwin Kernel Version 24.6.0", "arm64")
    os.uname = lambda: os.uname_result(names)
    platform.uname = lambda: platform.uname_result(*names)
    platform.libc_ver = lambda *args, **keywords: ("", "")
    platform.mac_ver = lambda *args, **keywords: ("15.6", ("", "", ""), "arm64")


def remove_names():
    """Removes Linux-only functions and constants."""
    from importlib import import_module

    for name, absent in LINUX_ONLY.items():
        for module in (import_module(each) for each in {name, BUILTIN.get(name, name)}):
            for each in absent.split():
                if hasattr(module, each):
                    delattr(module, each)


def hide_files():
    """Hides Linux-only files and folders."""
    import errno

    def is_hidden(path):
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        return any(name == each or name.startswith(f"{each}/") for each in HIDDEN)

    def missing(path):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def refuse(event, arguments):
        if event in ("open", "os.listdir", "os.scandir") and arguments and is_hidden(arguments[0]):
            raise missing(arguments[0])

    sys.addaudithook(refuse)
    for name in ("stat", "lstat"):
        real = getattr(os, name)

        def look(path, *arguments, real=real, **keywords):
            if is_hidden(path):
                raise missing(path)
            return real(path, *arguments, **keywords)

        for functions in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if real in functions:
                functions.add(look)
        setattr(os, name, look)


def hide_packages():
    """Hides packages that a Mac lacks; stubs the macOS modules that others import."""
    import types
    from importlib import metadata

    find = metadata.Distribution.from_name

    def from_name(name):
        if name in LINUX_PACKAGES:
            raise metadata.PackageNotFoundError(name)
        return find(name)

    metadata.Distribution.from_name = from_name
    proxies = types.ModuleType("_scproxy")  # urllib reads proxy settings from it
    proxies._get_proxy_settings = proxies._get_proxies = dict
    certificates = types.ModuleType("truststore._macos")  # httpcore2 reads certificates from it
    certificates._configure_context = None
    certificates._verify_peercerts_impl = None
    sys.modules |= {"_scproxy": proxies, "truststore._macos": certificates}
    sys.modules["trio"] = None  # type: ignore[assignment]  # it needs kqueue
    os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # trio registers one


def install():
    """Writes the .pth file into the environment and prints its path."""
    import sysconfig
    from pathlib import Path

    place = Path(sysconfig.get_path("purelib"))
    folder = str(Path(__file__).parent)
    call = f"sys.path.append({folder!r}); __import__('fake_darwin').apply(); sys.path.pop()"
    file = place / "fake_darwin.pth"
    file.write_text(f"import os, sys; exec({call!r}) if 'FAKE_DARWIN' in os.environ else None\n")
    print(file)


if __name__ == "__main__":
    install()
