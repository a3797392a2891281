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
	"unicode"
)

// Validate tells everything that is wrong, each with its key.
func (c Config) Validate() error {
	return errors.Join(
		absolute("runDir", c.RunDir),
		absolute("kubeletRoot", c.KubeletRoot),
		c.RuntimeSocket.validate("runtimeSocket"),
		c.AdminSocket.validate("adminSocket"),
		different(c.RuntimeSocket.Path, c.AdminSocket.Path),
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

func absolute(key, path string) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || strings.ContainsFunc(path, unicode.IsControl) {
		return fmt.Errorf("%s: %q is not an absolute, clean path", key, path)
	}
	return nil
}

func absoluteAll(key string, paths []string) error {
	var err error
	for i, path := range paths {
		err = errors.Join(err, absolute(fmt.Sprintf("%s[%d]", key, i), path))
	}
	return err
}

func notNegative(key string, d Duration) error {
	if d < 0 {
		return fmt.Errorf("%s: %v is negative", key, d.Std())
	}
	return nil
}

func positive(key string, d Duration) error {
	if d <= 0 {
		return fmt.Errorf("%s: %v is not a time to wait", key, d.Std())
	}
	return nil
}

func oneOf(key, value string, allowed ...string) error {
	if !slices.Contains(allowed, value) {
		return fmt.Errorf("%s: %q is none of %s", key, value, strings.Join(allowed, ", "))
	}
	return nil
}

// maxSocketPath is what fits into a sockaddr_un with its NUL.
const maxSocketPath = 107

func (s Socket) validate(key string) error {
	err := errors.Join(
		absolute(key+".path", s.Path),
		oneOf(key+".mode", s.Mode, "0600", "0660"),
		fitsSocket(key+".path", s.Path),
	)
	if s.Group != "" && s.Mode == "0600" {
		err = errors.Join(err, fmt.Errorf("%s.group: has no effect with mode 0600; use 0660", key))
	}
	return err
}

func fitsSocket(key, path string) error {
	if len(path) > maxSocketPath {
		return fmt.Errorf("%s: %d bytes are more than the %d of a socket's name", key, len(path), maxSocketPath)
	}
	return nil
}

func different(runtime, admin string) error {
	if runtime == admin {
		return fmt.Errorf("adminSocket.path: %q is the runtime socket too", admin)
	}
	return nil
}

func (c Callers) validate(key string) error {
	if len(c.UIDs)+len(c.GIDs) == 0 {
		return fmt.Errorf("%s: nobody may call: name uids or gids", key)
	}
	const none = ^uint32(0) // what the kernel says for "no id"
	if slices.Contains(c.UIDs, none) || slices.Contains(c.GIDs, none) {
		return fmt.Errorf("%s: %d is no id", key, none)
	}
	return nil
}

func (d Devices) validate() error {
	err := errors.Join(absoluteAll("devices.roots", d.Roots), absoluteAll("devices.images", d.Images))
	if len(d.Roots)+len(d.Images) == 0 {
		err = errors.Join(err, errors.New("devices.roots: no device could ever be taken"))
	}
	if slices.Contains(d.Images, "/") {
		err = errors.Join(err, errors.New("devices.images: / would make every file of the node a disk"))
	}
	for i, name := range d.Servers {
		if name == "" || strings.ContainsFunc(name, func(r rune) bool { return r == '/' || unicode.IsControl(r) }) {
			err = errors.Join(err, fmt.Errorf("devices.servers[%d]: %q is not the name of a program without its directory", i, name))
		}
	}
	return err
}

func (c Containerd) validate() error {
	if c.Socket == "" {
		return nil
	}
	err := absolute("containerd.socket", c.Socket)
	if c.Namespace == "" {
		err = errors.Join(err, errors.New("containerd.namespace: is empty; kubelet's is k8s.io"))
	}
	return err
}

func (r Relay) validate() error {
	return errors.Join(
		positive("relay.statsTimeout", r.StatsTimeout),
		positive("relay.expandTimeout", r.ExpandTimeout),
		positive("relay.slowAfter", r.SlowAfter),
		bounded("relay.concurrency", r.Concurrency),
		bounded("relay.maxSlow", r.MaxSlow))
}

func bounded(key string, n int) error {
	if n < 1 || n > 65536 {
		return fmt.Errorf("%s: %d is not between 1 and 65536", key, n)
	}
	return nil
}

func (h HTTP) validate() error {
	if path, ok := strings.CutPrefix(h.Listen, "unix:"); ok {
		return errors.Join(absolute("http.listen", path), fitsSocket("http.listen", path))
	}
	if h.Listen == "" {
		return nil
	}
	if err := hostPort(h.Listen); err != nil {
		return fmt.Errorf("http.listen: %q is neither host:port nor unix:/path: %w", h.Listen, err)
	}
	return nil
}

// hostPort finds addresses that can never be used. Whether a host exists, and is this
// node, is found out when it is used.
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
	if t.SampleRatio < 0 || t.SampleRatio > 1 {
		return fmt.Errorf("tracing.sampleRatio: %v is not between 0 and 1", t.SampleRatio)
	}
	if t.Endpoint == "" {
		return nil
	}
	if err := hostPort(t.Endpoint); err != nil {
		return fmt.Errorf("tracing.endpoint: %q is not host:port: %w", t.Endpoint, err)
	}
	return nil
}
