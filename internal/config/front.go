package config

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"

	"github.com/crust-proxy/crust-proxy/internal/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/policy"
	"github.com/crust-proxy/crust-proxy/internal/sys"
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
	// PrivateDir is where drivers are asked to stage and publish devices. Their
	// containers see only what lies below kubelet's plugins directory.
	PrivateDir string `json:"privateDir"`
	// DefaultFSType is for volumes whose request names no filesystem.
	DefaultFSType string `json:"defaultFSType"`
	// AcceptLeftovers takes a device for blank that has bytes on it in which
	// nobody knows a filesystem, as stock drivers do.
	AcceptLeftovers bool `json:"acceptLeftovers"`
	// AbandonVolumes lets the front be switched off although volumes that it
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
	f.PrivateDir = cmp.Or(f.PrivateDir, filepath.Join(kubeletRoot, "plugins/kubernetes.io/csi/crust-proxy.dev"))
}

func (f Front) validate(kubeletRoot string) error {
	plugins := filepath.Join(kubeletRoot, "plugins")
	return errors.Join(
		absolute("front.registry", f.Registry),
		absolute("front.kubeletRegistry", f.KubeletRegistry),
		absolute("front.privateDir", f.PrivateDir),
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
	// Format says who formats a blank device: host, guest or never.
	Format volume.FormatPolicy `json:"format"`
	// Runtimes say which handler serves the pods of a RuntimeClass's handler, by its
	// name or a pattern: kata, crust, or none, which refuses them.
	Runtimes map[string]string `json:"runtimes"`
	// Rules are asked in order; the first that matches decides.
	Rules []Rule `json:"rules"`
}

// Rule is a policy.Rule as it stands in the file.
type Rule struct {
	Name            string   `json:"name"`
	Drivers         []string `json:"drivers,omitempty"`
	Filesystems     []string `json:"filesystems,omitempty"`
	RuntimeHandlers []string `json:"runtimeHandlers,omitempty"`
	AccessModes     []string `json:"accessModes,omitempty"`
	// Annotated has the rule match only volumes that the pod asks for.
	Annotated bool `json:"annotated,omitempty"`
	// Defer must be said: a rule that forgot it would keep volumes on the host
	// without a word.
	Defer   *bool               `json:"defer"`
	Handler string              `json:"handler,omitempty"`
	Format  volume.FormatPolicy `json:"format,omitempty"`
	// MkfsOptions are arguments for mkfs of the rule's one filesystem.
	MkfsOptions []string `json:"mkfsOptions,omitempty"`
	// RootMode are the permissions of a new filesystem's root directory, in octal.
	RootMode string `json:"rootMode,omitempty"`
	// Grow is true unless said otherwise: an ext4 that is smaller than its device, and
	// that the sandbox cannot grow, is grown before it is handed over.
	Grow *bool `json:"grow,omitempty"`
}

// DeferralPolicy is the policy that decides.
func (c Config) DeferralPolicy() *policy.Policy { return c.Policy.deferral(c.Handlers.names()) }

func (p Policy) deferral(handlers []string) *policy.Policy {
	out := &policy.Policy{Format: p.Format, Rules: make([]policy.Rule, 0, len(p.Rules)), Runtimes: runtimes(p.Runtimes, handlers)}
	for _, rule := range p.Rules {
		out.Rules = append(out.Rules, policy.Rule{
			Name: rule.Name, Drivers: rule.Drivers, Filesystems: rule.Filesystems, RuntimeHandlers: rule.RuntimeHandlers,
			AccessModes: rule.AccessModes, Annotated: rule.Annotated, Defer: rule.Defer != nil && *rule.Defer, Handler: rule.Handler, Format: rule.Format,
			MakeFS:   volume.MakeFS{Options: rule.MkfsOptions, RootMode: rule.rootMode()},
			KeepSize: rule.Grow != nil && !*rule.Grow,
		})
	}
	return out
}

var rootModeForm = regexp.MustCompile(`^[0-7]{3,4}$`)

// rootMode gives the mode as a number; the form is checked with the rule.
func (r Rule) rootMode() uint32 {
	mode, err := strconv.ParseUint(r.RootMode, 8, 12)
	if err != nil {
		return 0
	}
	return uint32(mode)
}

func (r Rule) validateMakeFS(i int) (found []error) {
	if r.RootMode != "" && (!rootModeForm.MatchString(r.RootMode) || r.rootMode()&0o5000 != 0 || r.rootMode() == 0) {
		found = append(found, fmt.Errorf("policy.rules[%d] (%q).rootMode: %q is not of the form \"0775\" or \"2775\": permissions in octal, "+
			"in quotes, with the setgid bit at the most", i, r.Name, r.RootMode))
	}
	if len(r.Filesystems) == 1 {
		if err := mkfs.CheckOptions(r.Filesystems[0], r.MkfsOptions); err != nil {
			found = append(found, fmt.Errorf("policy.rules[%d] (%q).mkfsOptions: %w", i, r.Name, err))
		}
	}
	return found
}

func (p Policy) validate(handlers []string) error {
	var found []error
	for i, rule := range p.Rules {
		if rule.Defer == nil {
			found = append(found, fmt.Errorf("policy.rules[%d] (%q).defer: is missing: say true or false", i, rule.Name))
		}
		found = append(found, rule.validateMakeFS(i)...)
	}
	found = append(found, validateRuntimes(p.Runtimes)...)
	if len(found) > 0 {
		return errors.Join(found...)
	}
	return p.deferral(handlers).Validate(handlers)
}

// annotatedNeedsCluster refuses rules that could never match: a pod that asks would
// have its volumes on the host without a word.
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

// Warnings names what is allowed, and rarely meant.
func (c Config) Warnings() []string {
	var lines []string
	if c.ReconcileInterval == 0 {
		lines = append(lines, "reconcileInterval: 0 is never: what a crash leaves stays until somebody runs crustctl reconcile")
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
