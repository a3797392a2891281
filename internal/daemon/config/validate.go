package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Validate returns all errors, each with its key.
func (c Config) Validate() error {
	return errors.Join(
		absolute("runDir", c.RunDir),
		absolute("kubeletRoot", c.KubeletRoot),
		c.RuntimeSocket.validate("runtimeSocket"),
		c.AdminSocket.validate("adminSocket"),
		wrong(c.RuntimeSocket.Path == c.AdminSocket.Path, "adminSocket.path: %q is the runtime socket too", c.AdminSocket.Path),
		c.Authorization.Runtime.validate("authorization.runtime"),
		c.Authorization.Admin.validate("authorization.admin"),
		c.Authorization.CSI.validate("authorization.csi"),
		c.Devices.validate(),
		c.Handlers.validate(),
		c.Front.validate(c.KubeletRoot),
		c.Policy.validate(c.Handlers.names()),
		c.Cluster.validate(),
		c.annotatedNeedsCluster(),
		c.Containerd.validate(),
		c.CRI.validate(c.Containerd),
		c.Relay.validate(),
		notNegative("reconcileInterval", c.ReconcileInterval),
		notNegative("shutdownTimeout", c.ShutdownTimeout),
		c.HTTP.validate(),
		c.Tracing.validate(),
		oneOf("log.level", c.Log.Level, "debug", "info", "warn", "error"),
	)
}

// wrong returns the error if the condition holds.
func wrong(condition bool, format string, args ...any) error {
	if condition {
		return fmt.Errorf(format, args...)
	}
	return nil
}

func absolute(key, path string) error {
	return wrong(!filepath.IsAbs(path) || filepath.Clean(path) != path || !sys.IsText(path),
		"%s: %q is not an absolute, clean path", key, path)
}

func absoluteOrEmpty(key, path string) error {
	if path == "" {
		return nil
	}
	return absolute(key, path)
}

func absoluteAll(key string, paths []string) error {
	var err error
	for i, path := range paths {
		err = errors.Join(err, absolute(fmt.Sprintf("%s[%d]", key, i), path))
	}
	return err
}

func notNegative(key string, d Duration) error {
	return wrong(d < 0, "%s: %v is negative", key, d.Std())
}

func positive(key string, d Duration) error {
	return wrong(d <= 0, "%s: %v is not a time to wait", key, d.Std())
}

func oneOf(key, value string, allowed ...string) error {
	return wrong(!slices.Contains(allowed, value), "%s: %q is none of %s", key, value, strings.Join(allowed, ", "))
}

func (s Socket) validate(key string) error {
	return errors.Join(
		absolute(key+".path", s.Path),
		oneOf(key+".mode", s.Mode, "0600", "0660"),
		fitsSocket(key+".path", s.Path),
		wrong(s.Group != "" && s.Mode == "0600", "%s.group: has no effect with mode 0600; use 0660", key))
}

func fitsSocket(key, path string) error {
	return wrong(len(path) > sys.MaxSocketPath, "%s: %d bytes are more than the %d of a socket's name", key, len(path), sys.MaxSocketPath)
}

func (c Callers) validate(key string) error {
	const none = ^uint32(0) // the kernel's "no id"
	return errors.Join(
		wrong(len(c.UIDs)+len(c.GIDs) == 0, "%s: nobody may call: name uids or gids", key),
		wrong(slices.Contains(c.UIDs, none) || slices.Contains(c.GIDs, none), "%s: %d is no id", key, none))
}

func (d Devices) validate() error {
	err := errors.Join(
		absoluteAll("devices.roots", d.Roots),
		absoluteAll("devices.images", d.Images),
		wrong(len(d.Roots)+len(d.Images) == 0, "devices.roots: no device could ever be taken"),
		wrong(slices.Contains(d.Images, "/"), "devices.images: / would make every file of the node a disk"))
	for i, name := range d.Servers {
		isPath := strings.Contains(name, "/") || !sys.IsText(name)
		err = errors.Join(err, wrong(name == "" || isPath,
			"devices.servers[%d]: %q is not the name of a program without its directory", i, name))
	}
	return err
}

func (c Containerd) validate() error {
	return errors.Join(
		absoluteOrEmpty("containerd.socket", c.Socket),
		wrong(c.Socket != "" && c.Namespace == "", "containerd.namespace: is empty; kubelet's is k8s.io"))
}

func (r Relay) validate() error {
	const most = 65536
	return errors.Join(
		positive("relay.statsTimeout", r.StatsTimeout),
		positive("relay.expandTimeout", r.ExpandTimeout),
		positive("relay.slowAfter", r.SlowAfter),
		wrong(r.Concurrency < 1 || r.Concurrency > most, "relay.concurrency: %d is not between 1 and %d", r.Concurrency, most),
		wrong(r.MaxSlow < 1 || r.MaxSlow > most, "relay.maxSlow: %d is not between 1 and %d", r.MaxSlow, most))
}

func (h HTTP) validate() error {
	if path, ok := strings.CutPrefix(h.Listen, "unix:"); ok {
		return errors.Join(absolute("http.listen", path), fitsSocket("http.listen", path))
	}
	if h.Listen == "" {
		return nil
	}
	err := hostPort(h.Listen)
	return wrong(err != nil, "http.listen: %q is neither host:port nor unix:/path: %w", h.Listen, err)
}

// hostPort refuses addresses that can never be used. Whether the host exists, and is this
// node, shows only when it is used.
func hostPort(address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("the port %q is not a number from 1 to 65535", port)
	}
	if _, err := netip.ParseAddr(host); err != nil && host != "" && strings.Trim(host, "0123456789.:") == "" {
		return fmt.Errorf("the host %q looks like an IP address and is none", host)
	}
	return nil
}

func (t Tracing) validate() error {
	err := wrong(t.SampleRatio < 0 || t.SampleRatio > 1, "tracing.sampleRatio: %v is not between 0 and 1", t.SampleRatio)
	if t.Endpoint != "" {
		if bad := hostPort(t.Endpoint); bad != nil {
			err = errors.Join(err, fmt.Errorf("tracing.endpoint: %q is not host:port: %w", t.Endpoint, bad))
		}
	}
	return err
}
