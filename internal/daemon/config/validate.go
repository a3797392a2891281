package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Validate returns all errors, each with its key.
func (c Config) Validate() error {
	const most = 65536 // of Relay
	return errors.Join(
		validateValue("", reflect.ValueOf(c), ""),
		wrong(c.RuntimeSocket.Group != "" && c.RuntimeSocket.Mode == "0600", noGroup, "runtimeSocket"),
		wrong(c.AdminSocket.Group != "" && c.AdminSocket.Mode == "0600", noGroup, "adminSocket"),
		wrong(c.RuntimeSocket.Path == c.AdminSocket.Path, "adminSocket.path: %q is the runtime socket too", c.AdminSocket.Path),
		c.Authorization.Runtime.validate("authorization.runtime"),
		c.Authorization.Admin.validate("authorization.admin"),
		c.Authorization.CSI.validate("authorization.csi"),
		wrong(len(c.Devices.Roots)+len(c.Devices.Images) == 0, "devices.roots: no device could ever be taken"),
		wrong(slices.Contains(c.Devices.Images, "/"), "devices.images: / would make every file of the node a disk"),
		c.Handlers.validate(),
		c.Front.validate(c.KubeletRoot),
		c.Policy.validate(c.Handlers.names()),
		c.Cluster.validate(),
		c.annotatedNeedsCluster(),
		wrong(c.CRI.Socket != "" && c.Containerd.Socket != "", "cri.socket: a node's sandboxes are asked for in one place: "+
			"set containerd.socket to \"\" for CRI-O and others, or leave cri.socket empty for containerd"),
		wrong(c.Relay.Concurrency < 1 || c.Relay.Concurrency > most, "relay.concurrency: %d is not between 1 and %d", c.Relay.Concurrency, most),
		wrong(c.Relay.MaxSlow < 1 || c.Relay.MaxSlow > most, "relay.maxSlow: %d is not between 1 and %d", c.Relay.MaxSlow, most),
		c.HTTP.validate(),
		c.Tracing.validate(),
	)
}

const noGroup = "%s.group: has no effect with mode 0600; use 0660"

// validateValue checks a value, and all in it, by the tag "is" of its field.
func validateValue(key string, v reflect.Value, is string) (err error) {
	switch v.Kind() {
	case reflect.Struct:
		for field, value := range v.Fields() {
			err = errors.Join(err, validateValue(strings.TrimPrefix(key+"."+keyOf(field), "."), value, field.Tag.Get("is")))
		}
	case reflect.Slice:
		for i := range v.Len() {
			err = errors.Join(err, validateValue(fmt.Sprintf("%s[%d]", key, i), v.Index(i), is))
		}
	case reflect.String:
		return validateText(key, v.String(), is)
	case reflect.Int64:
		d := time.Duration(v.Int())
		return errors.Join(
			wrong(is == ">0" && d <= 0, "%s: %v is not a time to wait", key, d),
			wrong(is == ">=0" && d < 0, "%s: %v is negative", key, d))
	}
	return err
}

func validateText(key, text, is string) error {
	is, optional := strings.CutSuffix(is, "?")
	switch {
	case is == "" || optional && text == "":
		return nil
	case is == "path":
		return absolute(key, text)
	case is == "socket":
		return errors.Join(absolute(key, text), fitsSocket(key, text))
	case is == "filesystem":
		return wrong(!volume.IsFSType(text), "%s: %q is not a filesystem's name", key, text)
	case is == "program":
		return wrong(text == "" || strings.Contains(text, "/") || !sys.IsText(text),
			"%s: %q is not the name of a program without its directory", key, text)
	}
	return oneOf(key, text, strings.Split(is, "|")...)
}

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

func oneOf(key, value string, allowed ...string) error {
	return wrong(!slices.Contains(allowed, value), "%s: %q is none of %s", key, value, strings.Join(allowed, ", "))
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
	between := t.SampleRatio >= 0 && t.SampleRatio <= 1 // .nan is not
	err := wrong(!between, "tracing.sampleRatio: %v is not between 0 and 1", t.SampleRatio)
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
		wrong(len(h.Kata.Filesystems) == 0, "handlers.kata.filesystems: no volume could ever be deferred"),
		wrong(len(h.Crust.Filesystems) == 0, "handlers.crust.filesystems: no volume could ever be deferred"),
		wrong(sys.Within(h.Kata.DirectVolumes, h.Kata.TempDir),
			"handlers.kata.tempDir: %q lies in directVolumes, where Kata takes every file for a sandbox", h.Kata.TempDir),
		wrong(sys.Within(h.Crust.Root, h.Crust.TempDir),
			"handlers.crust.tempDir: %q lies in root, where runtimes look for volumes", h.Crust.TempDir),
		wrong(len(h.Crust.Programs)+len(h.Crust.SocketDirs) == 0,
			"handlers.crust.programs: no sandbox could ever be asked: name programs, or socketDirs"),
		wrong(sys.Within(h.Kata.DirectVolumes, h.Crust.Root) || sys.Within(h.Crust.Root, h.Kata.DirectVolumes),
			"handlers.crust.root: %q and handlers.kata.directVolumes lie in each other", h.Crust.Root),
		oneOf("handlers.default", h.Default, on...))
}

func (f Front) validate(kubeletRoot string) error {
	plugins := filepath.Join(kubeletRoot, "plugins")
	return errors.Join(
		wrong(sys.Within(f.KubeletRegistry, f.Registry) || sys.Within(f.Registry, f.KubeletRegistry),
			"front.registry: %q and front.kubeletRegistry lie in each other: kubelet looks "+
				"into all that is below its own, and would take the drivers' sockets itself", f.Registry),
		wrong(!sys.Within(plugins, f.PrivateDir) || f.PrivateDir == plugins,
			"front.privateDir: %q does not lie below %s, which is what the containers of drivers see", f.PrivateDir, plugins))
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
func (c Config) Warnings() (lines []string) {
	if c.ReconcileInterval == 0 {
		lines = append(lines, "reconcileInterval: 0 is never: what a crash leaves stays until somebody runs crustctl reconcile")
	} else if c.ReconcileInterval > 5*time.Minute {
		lines = append(lines, "reconcileInterval: with more than 5m the alert CrustProxyRepairsFail comes and goes while a repair fails")
	}
	if rawBlock := filepath.Join(c.KubeletRoot, "plugins/kubernetes.io/csi/volumeDevices"); !sys.Within(rawBlock, c.Front.PrivateDir) {
		lines = append(lines, fmt.Sprintf("front.privateDir: it is not below %s, and some drivers (Proxmox) treat volumes elsewhere as "+
			"filesystems: remove the key", rawBlock))
	}
	if name := c.Containerd.Namespace; name != "" && name != "k8s.io" { // older files have kubelet's
		lines = append(lines, "containerd.namespace: it has no effect, because the CRI is asked, which serves kubelet's alone: remove the key")
	}
	if c.Handlers.Kata.Enabled && c.Containerd.Socket == "" && c.CRI.Socket == "" {
		lines = append(lines, "handlers.kata: sandboxes of runtime-rs are not found without a container runtime, so the kernel's count alone keeps "+
			"their volumes from being released: set containerd.socket or cri.socket")
	}
	if len(c.Policy.Rules) > 0 && !c.Front.Enabled {
		return append(lines, "policy.rules: they decide for drivers behind the front only, and front.enabled is false")
	}
	if c.Cluster.On() {
		return lines
	}
	if slices.ContainsFunc(c.Policy.Rules, func(r policy.Rule) bool { return r.Defer }) {
		lines = append(lines, "policy.rules: no pod is known here, so that the fsGroup of pods has no effect on deferred volumes, unless their driver "+
			"has VOLUME_MOUNT_GROUP: set cluster.kubeconfig or cluster.inCluster")
	}
	for i, rule := range c.Policy.Rules {
		for _, key := range rule.ByPod() {
			lines = append(lines, fmt.Sprintf("policy.rules[%d] (%q).%s: no pod is known here, so that every volume which "+
				"comes to this rule is refused: set cluster.kubeconfig or cluster.inCluster", i, rule.Name, key))
		}
	}
	return lines
}

var nodeForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`) // a DNS subdomain

func (c Cluster) validate() error {
	return errors.Join(
		wrong(c.Events && !c.On(), "cluster.events: no API server is known to post them to: set cluster.kubeconfig or cluster.inCluster"),
		wrong(c.Kubeconfig != "" && c.InCluster, "cluster.inCluster: the API server is asked by one identity: leave "+
			"cluster.kubeconfig empty for the service account of the daemon's pod, or set inCluster to false"),
		wrong(c.NodeName != "" && (len(c.NodeName) > 253 || !nodeForm.MatchString(c.NodeName)),
			"cluster.nodeName: %q is not a node's name: kubectl get nodes shows it", c.NodeName))
}
