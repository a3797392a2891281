// Package systemd is the daemon's part of the service manager's protocols:
// sockets and stored descriptors that come with the start, notifications, the
// watchdog and the file-descriptor store. Without systemd all of it does nothing.
package systemd
