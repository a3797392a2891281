package config

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/spf13/pflag"
)

const maxFile = 1 << 20

// Flags are the command line's part of the configuration. A flag that is set overrides the
// file.
type Flags struct {
	set  *pflag.FlagSet
	File string
	// abandon is front.abandonVolumes, which the file may set too.
	abandon bool
}

// fields are the keys that have a flag.
var fields = []struct {
	flag  string
	key   func(*Config) *string
	usage string
}{
	{"run-dir", func(c *Config) *string { return &c.RunDir }, "directory of sockets and state, on tmpfs"},
	{"kubelet-root", func(c *Config) *string { return &c.KubeletRoot }, "directory below which all targets lie"},
	{"runtime-socket", func(c *Config) *string { return &c.RuntimeSocket.Path }, "socket of the Runtime API"},
	{"admin-socket", func(c *Config) *string { return &c.AdminSocket.Path }, "socket of the Admin API"},
	{"containerd-socket", func(c *Config) *string { return &c.Containerd.Socket }, "containerd's socket; empty is off"},
	{"cri-socket", func(c *Config) *string { return &c.CRI.Socket }, "CRI-O's socket, where the container runtime is not containerd"},
	{"kubeconfig", func(c *Config) *string { return &c.Cluster.Kubeconfig }, "how to ask the cluster about this node's pods; empty is off"},
	{"node-name", func(c *Config) *string { return &c.Cluster.NodeName }, "this node's name in the cluster; empty is the host name"},
	{"http-listen", func(c *Config) *string { return &c.HTTP.Listen }, "metrics and health: host:port, unix:/path, or empty for off"},
	{"log-level", func(c *Config) *string { return &c.Log.Level }, "debug, info, warn or error"},
}

// AddFlags defines the flags.
func AddFlags(set *pflag.FlagSet) *Flags {
	f := &Flags{set: set}
	set.StringVar(&f.File, "config", "", "YAML configuration file; what it does not say keeps its default")
	set.BoolVar(&f.abandon, "abandon-volumes", false, "go on although deferred volumes live on this node: also front.abandonVolumes")
	usual := Default()
	for _, field := range fields {
		set.String(field.flag, *field.key(&usual), field.usage)
	}
	return f
}

// Source describes where the configuration comes from.
func (f *Flags) Source() string {
	if f.File == "" {
		return "the defaults and flags alone: no --config is given; the service reads /etc/crust-proxy/config.yaml"
	}
	return f.File + ", with the defaults and flags"
}

// Load returns the validated configuration from file and flags.
func (f *Flags) Load() (Config, error) {
	cfg := base()
	if f.File != "" {
		raw, err := readFile(f.File)
		if err != nil {
			return Config{}, err
		}
		if cfg, err = parse(raw); err != nil {
			return Config{}, fmt.Errorf("%s: %w", f.File, err)
		}
	}
	f.apply(&cfg)
	cfg = cfg.complete()
	if err := cfg.Validate(); err != nil {
		if f.File != "" {
			err = fmt.Errorf("%s: %w", f.File, err)
		}
		return Config{}, err
	}
	return cfg, nil
}

func (f *Flags) apply(cfg *Config) {
	cfg.Front.AbandonVolumes = cfg.Front.AbandonVolumes || f.abandon
	for _, field := range fields {
		if flag := f.set.Lookup(field.flag); flag.Changed {
			*field.key(cfg) = flag.Value.String()
		}
	}
}

func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("the configuration cannot be read: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fmt.Errorf("the configuration %s is not a regular file of at most %d bytes", path, maxFile)
	}
	raw, err := os.ReadFile(path) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, fmt.Errorf("the configuration cannot be read: %w", err)
	}
	return raw, nil
}

// Parse reads YAML over the defaults. Unknown and duplicate keys are errors: a misspelt key
// must not silently keep its default.
func Parse(raw []byte) (Config, error) {
	cfg, err := parse(raw)
	if err != nil {
		return Config{}, err
	}
	return cfg.complete(), nil
}

func parse(raw []byte) (Config, error) {
	text, err := toJSON(raw)
	if err != nil {
		return Config{}, err
	}
	if err := check(text); err != nil {
		return Config{}, err
	}
	cfg := base()
	if err := json.Unmarshal(text, &cfg); err != nil {
		return Config{}, err
	}
	return cfg, nil
}
