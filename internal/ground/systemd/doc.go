// Package systemd implements the daemon's side of the service manager's protocols: sockets
// and stored descriptors that are passed at the start, notifications, the watchdog and the
// file-descriptor store. Without systemd all of it does nothing.
package systemd
