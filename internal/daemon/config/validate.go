package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Validate returns all errors, each with its key.
func (c Config) Validate() error {
	return errors.Join(
		c.validateRoots(),
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

// validateRoots checks the directories below which the defaults of others are.
func (c Config) validateRoots() error {
	return errors.Join(absolute("runDir", c.RunDir), absolute("kubeletRoot", c.KubeletRoot))
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

func absoluteOrEmpty(key, path string) error { return absolute(key, cmp.Or(path, "/")) }

// each checks the values of a list.
func each(key string, values []string, check func(key, value string) error) error {
	var err error
	for i, value := range values {
		err = errors.Join(err, check(fmt.Sprintf("%s[%d]", key, i), value))
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
	return errors.Join(
		each("devices.roots", d.Roots, absolute),
		each("devices.images", d.Images, absolute),
		wrong(len(d.Roots)+len(d.Images) == 0, "devices.roots: no device could ever be taken"),
		wrong(slices.Contains(d.Images, "/"), "devices.images: / would make every file of the node a disk"),
		each("devices.servers", d.Servers, programName))
}

func programName(key, name string) error {
	return wrong(name == "" || strings.Contains(name, "/") || !sys.IsText(name),
		"%s: %q is not the name of a program without its directory", key, name)
}

func (c Containerd) validate() error {
	return absoluteOrEmpty("containerd.socket", c.Socket)
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
	if bad := hostPort(t.Endpoint); t.Endpoint != "" && bad != nil {
		err = errors.Join(err, fmt.Errorf("tracing.endpoint: %q is not host:port: %w", t.Endpoint, bad))
	}
	return err
}

func (h Handlers) validate() error {
	on := h.names()
	if len(on) == 0 {
		return errors.New("handlers.kata.enabled: no handler would be left: enable it, or handlers.crust")
	}
	return errors.Join(
		h.Kata.validate(),
		h.Crust.validate(),
		wrong(sys.Within(h.Kata.DirectVolumes, h.Crust.Root) || sys.Within(h.Crust.Root, h.Kata.DirectVolumes),
			"handlers.crust.root: %q and handlers.kata.directVolumes lie in each other", h.Crust.Root),
		oneOf("handlers.default", h.Default, on...))
}

func (k Kata) validate() error {
	const key = "handlers.kata."
	return errors.Join(
		absolute(key+"directVolumes", k.DirectVolumes),
		absolute(key+"goSandboxes", k.GoSandboxes),
		absolute(key+"rustSandboxes", k.RustSandboxes),
		absolute(key+"sharedSandboxes", k.SharedSandboxes),
		filesystems(key+"filesystems", k.Filesystems),
		absoluteOrEmpty(key+"tempDir", k.TempDir),
		// Kata takes every name in its tree for a volume or sandbox.
		wrong(sys.Within(k.DirectVolumes, k.TempDir),
			key+"tempDir: %q lies in directVolumes, where Kata takes every file for a sandbox", k.TempDir))
}

func (c Crust) validate() error {
	const key = "handlers.crust."
	return errors.Join(
		absolute(key+"root", c.Root),
		each(key+"programs", c.Programs, absolute),
		each(key+"socketDirs", c.SocketDirs, absolute),
		filesystems(key+"filesystems", c.Filesystems),
		absoluteOrEmpty(key+"tempDir", c.TempDir),
		wrong(sys.Within(c.Root, c.TempDir), key+"tempDir: %q lies in root, where runtimes look for volumes", c.TempDir),
		wrong(len(c.Programs)+len(c.SocketDirs) == 0,
			key+"programs: no sandbox could ever be asked: name programs, or socketDirs"))
}

func filesystems(key string, names []string) error {
	return errors.Join(wrong(len(names) == 0, "%s: no volume could ever be deferred", key), each(key, names, filesystem))
}

func filesystem(key, name string) error {
	return wrong(!volume.IsFSType(name), "%s: %q is not a filesystem's name", key, name)
}

func (f Front) validate(kubeletRoot string) error {
	plugins := filepath.Join(kubeletRoot, "plugins")
	return errors.Join(
		absolute("front.registry", f.Registry),
		absolute("front.kubeletRegistry", f.KubeletRegistry),
		absolute("front.privateDir", f.PrivateDir),
		absolute("front.marksDir", f.MarksDir),
		positive("front.driverTimeout", f.DriverTimeout),
		wrong(sys.Within(f.KubeletRegistry, f.Registry) || sys.Within(f.Registry, f.KubeletRegistry),
			"front.registry: %q and front.kubeletRegistry lie in each other: kubelet looks "+
				"into all that is below its own, and would take the drivers' sockets itself", f.Registry),
		wrong(!sys.Within(plugins, f.PrivateDir) || f.PrivateDir == plugins,
			"front.privateDir: %q does not lie below %s, which is what the containers of drivers see", f.PrivateDir, plugins),
		filesystem("front.defaultFSType", f.DefaultFSType))
}

func (p Policy) validate(handlers []string) error {
	found := validateRuntimes(p.Runtimes)
	if len(found) == 0 { // the rules refer to them
		found = append(found, p.deferral(handlers).Validate(handlers))
	}
	for i, rule := range p.Rules {
		if len(rule.Filesystems) != 1 {
			continue // options without exactly one filesystem are refused above
		}
		if err := mkfs.CheckOptions(rule.Filesystems[0], rule.MkfsOptions); err != nil {
			found = append(found, fmt.Errorf("policy.rules[%d] (%q).mkfsOptions: %w", i, rule.Name, err))
		}
	}
	return errors.Join(found...)
}

// annotatedNeedsCluster refuses annotated rules without a cluster. They could never match: a
// pod that asks would silently have its volumes on the host.
func (c Config) annotatedNeedsCluster() error {
	if !c.Front.Enabled || c.Cluster.On() {
		return nil
	}
	var found []error
	for i, rule := range c.Policy.Rules {
		if rule.Annotated {
			found = append(found, fmt.Errorf("policy.rules[%d] (%q).annotated: no pod's annotation is known here: set cluster.kubeconfig or "+
				"cluster.inCluster, or take the rule out", i, rule.Name))
		}
	}
	return errors.Join(found...)
}

// Warnings lists settings that are valid and rarely intended.
func (c Config) Warnings() []string {
	var lines []string
	if c.ReconcileInterval == 0 {
		lines = append(lines, "reconcileInterval: 0 is never: what a crash leaves stays until somebody runs crustctl reconcile")
	}
	if rawBlock := filepath.Join(c.KubeletRoot, "plugins/kubernetes.io/csi/volumeDevices"); !sys.Within(rawBlock, c.Front.PrivateDir) {
		lines = append(lines, fmt.Sprintf("front.privateDir: it is not below %s, and some drivers (Proxmox) treat volumes elsewhere as "+
			"filesystems: remove the key", rawBlock))
	}
	if name := c.Containerd.Namespace; name != "" && name != "k8s.io" { // older files have kubelet's
		lines = append(lines, "containerd.namespace: it has no effect, because the CRI is asked, which serves kubelet's alone: remove the key")
	}
	if len(c.Policy.Rules) > 0 && !c.Front.Enabled {
		return append(lines, "policy.rules: they decide for drivers behind the front only, and front.enabled is false")
	}
	if c.Cluster.On() {
		return lines
	}
	for i, rule := range c.Policy.Rules {
		if len(rule.RuntimeHandlers) > 0 {
			lines = append(lines, fmt.Sprintf("policy.rules[%d] (%q).runtimeHandlers: no pod's runtime is known here, so that every volume which "+
				"comes to this rule is refused: set cluster.kubeconfig or cluster.inCluster", i, rule.Name))
		}
	}
	return lines
}

var nodeForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`) // a DNS subdomain

func (c Cluster) validate() error {
	return errors.Join(
		absoluteOrEmpty("cluster.kubeconfig", c.Kubeconfig),
		wrong(c.Kubeconfig != "" && c.InCluster, "cluster.inCluster: the API server is asked by one identity: leave "+
			"cluster.kubeconfig empty for the service account of the daemon's pod, or set inCluster to false"),
		wrong(c.NodeName != "" && (len(c.NodeName) > 253 || !nodeForm.MatchString(c.NodeName)),
			"cluster.nodeName: %q is not a node's name: kubectl get nodes shows it", c.NodeName))
}

func (c CRI) validate(containerd Containerd) error {
	if c.Socket == "" {
		return nil
	}
	return errors.Join(
		absolute("cri.socket", c.Socket),
		fitsSocket("cri.socket", c.Socket),
		wrong(containerd.Socket != "", "cri.socket: a node's sandboxes are asked for in one place: "+
			"set containerd.socket to \"\" for CRI-O and others, or leave cri.socket empty for containerd"))
}
