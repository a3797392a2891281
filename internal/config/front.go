package config

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
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
	// DriverTimeout bounds one call to a driver that came without a deadline.
	DriverTimeout Duration `json:"driverTimeout"`
}

// complete sets what follows from the kubelet root.
func (f *Front) complete(kubeletRoot string) {
	for path, below := range map[*string]string{
		&f.Registry:        "crust-proxy/registry",
		&f.KubeletRegistry: "plugins_registry",
		&f.PrivateDir:      "plugins/kubernetes.io/csi/crust-proxy.dev",
	} {
		if *path == "" {
			*path = filepath.Join(kubeletRoot, below)
		}
	}
}

func (f Front) validate(kubeletRoot string) error {
	err := errors.Join(
		absolute("front.registry", f.Registry),
		absolute("front.kubeletRegistry", f.KubeletRegistry),
		absolute("front.privateDir", f.PrivateDir),
		positive("front.driverTimeout", f.DriverTimeout),
	)
	if within(f.KubeletRegistry, f.Registry) || within(f.Registry, f.KubeletRegistry) {
		err = errors.Join(err, fmt.Errorf("front.registry: %q and front.kubeletRegistry lie in each other: kubelet looks "+
			"into all that is below its own, and would take the drivers' sockets itself", f.Registry))
	}
	plugins := filepath.Join(kubeletRoot, "plugins")
	if !within(plugins, f.PrivateDir) || f.PrivateDir == plugins {
		err = errors.Join(err, fmt.Errorf("front.privateDir: %q does not lie below %s, which is what the containers of "+
			"drivers see", f.PrivateDir, plugins))
	}
	if !fsForm.MatchString(f.DefaultFSType) {
		err = errors.Join(err, fmt.Errorf("front.defaultFSType: %q is not a filesystem's name", f.DefaultFSType))
	}
	return err
}

// Policy decides which CSI volumes are deferred.
type Policy struct {
	// Format says who formats a blank device: host, guest or never.
	Format deferral.FormatPolicy `json:"format"`
	// Rules are asked in order; the first that matches decides.
	Rules []Rule `json:"rules"`
}

// Rule is a deferral.Rule as it stands in the file.
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
	Defer   *bool                 `json:"defer"`
	Handler string                `json:"handler,omitempty"`
	Format  deferral.FormatPolicy `json:"format,omitempty"`
}

// Deferral is the policy that decides.
func (p Policy) Deferral() *deferral.Policy {
	out := &deferral.Policy{Format: p.Format, Rules: make([]deferral.Rule, 0, len(p.Rules))}
	for _, rule := range p.Rules {
		out.Rules = append(out.Rules, deferral.Rule{
			Name: rule.Name, Drivers: rule.Drivers, Filesystems: rule.Filesystems, RuntimeHandlers: rule.RuntimeHandlers,
			AccessModes: rule.AccessModes, Annotated: rule.Annotated, Defer: rule.Defer != nil && *rule.Defer, Handler: rule.Handler, Format: rule.Format,
		})
	}
	return out
}

func (p Policy) validate(handlers []string) error {
	var found []error
	for i, rule := range p.Rules {
		if rule.Defer == nil {
			found = append(found, fmt.Errorf("policy.rules[%d] (%q).defer: is missing: say true or false", i, rule.Name))
		}
	}
	if len(found) > 0 {
		return errors.Join(found...)
	}
	return p.Deferral().Validate(handlers)
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
