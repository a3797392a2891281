package config

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Front stands between kubelet and CSI drivers.
type Front struct {
	// Enabled is false by default.
	Enabled bool `json:"enabled"`
	// Registry is where the drivers' registrars register, and KubeletRegistry is
	// where the front registers in their place.
	Registry        string `json:"registry"`
	KubeletRegistry string `json:"kubeletRegistry"`
	// PrivateDir is where drivers are asked to stage and publish devices: among kubelet's own
	// raw block volumes. Their containers see only what lies below kubelet's plugins directory.
	PrivateDir string `json:"privateDir"`
	// MarksDir has a file for each volume that a sandbox had read-write. It must survive a
	// reboot.
	MarksDir string `json:"marksDir"`
	// DefaultFSType is for volumes whose request names no filesystem.
	DefaultFSType string `json:"defaultFSType"`
	// AcceptLeftovers treats a device as blank that has bytes on it without a known
	// signature, as stock drivers do.
	AcceptLeftovers bool `json:"acceptLeftovers"`
	// AbandonVolumes allows the front to be switched off although volumes that it
	// deferred live.
	AbandonVolumes bool `json:"abandonVolumes"`
	// VolumeCondition tells kubelet that the front reports the VOLUME_CONDITION of CSI
	// 1.12, which Kubernetes reads up to 1.36, behind its feature gate CSIVolumeHealth.
	VolumeCondition bool `json:"volumeCondition"`
	// DriverTimeout bounds one call to a driver that came without a deadline.
	DriverTimeout Duration `json:"driverTimeout"`
}

func (f *Front) complete(kubeletRoot string) {
	f.Registry = cmp.Or(f.Registry, filepath.Join(kubeletRoot, "crust-proxy/registry"))
	f.KubeletRegistry = cmp.Or(f.KubeletRegistry, filepath.Join(kubeletRoot, "plugins_registry"))
	f.MarksDir = cmp.Or(f.MarksDir, filepath.Join(kubeletRoot, "crust-proxy/marks"))
	csi := filepath.Join(kubeletRoot, "plugins/kubernetes.io/csi")
	if f.PrivateDir == "" || filepath.Clean(f.PrivateDir) == filepath.Join(csi, "crust-proxy.dev") { // the earlier default, in older files
		f.PrivateDir = filepath.Join(csi, "volumeDevices")
	}
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

// Policy decides which CSI volumes are deferred.
type Policy struct {
	// Format says who formats a blank device: host or never; guest means never.
	Format volume.FormatPolicy `json:"format"`
	// Runtimes maps the handler of a RuntimeClass, by its name or a pattern, to the
	// handler that serves its pods: kata, crust, or none, which refuses them.
	Runtimes map[string]string `json:"runtimes"`
	// Rules are evaluated in order; the first that matches decides.
	Rules []policy.Rule `json:"rules"`
}

// DeferralPolicy is the policy that decides.
func (c Config) DeferralPolicy() *policy.Policy { return c.Policy.deferral(c.Handlers.names()) }

func (p Policy) deferral(handlers []string) *policy.Policy {
	return &policy.Policy{Format: p.Format, Rules: p.Rules, Runtimes: runtimes(p.Runtimes, handlers)}
}

func (p Policy) validate(handlers []string) error {
	found := validateRuntimes(p.Runtimes)
	for i, rule := range p.Rules {
		if len(rule.Filesystems) != 1 {
			continue // options without exactly one filesystem are refused below
		}
		if err := mkfs.CheckOptions(rule.Filesystems[0], rule.MkfsOptions); err != nil {
			found = append(found, fmt.Errorf("policy.rules[%d] (%q).mkfsOptions: %w", i, rule.Name, err))
		}
	}
	if len(found) > 0 {
		return errors.Join(found...)
	}
	return p.deferral(handlers).Validate(handlers)
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
