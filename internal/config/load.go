package config

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/spf13/pflag"
)

const maxFile = 1 << 20

// Flags are the command line's words on the configuration. What is set there
// wins over the file.
type Flags struct {
	set  *pflag.FlagSet
	File string
	over Config
	// abandon is front.abandonVolumes, which the file may say too.
	abandon bool
}

// AddFlags defines the flags.
func AddFlags(set *pflag.FlagSet) *Flags {
	f := &Flags{set: set, over: Default()}
	c := &f.over
	set.StringVar(&f.File, "config", "", "YAML configuration file; what it does not say keeps its default")
	set.StringVar(&c.RunDir, "run-dir", c.RunDir, "directory of sockets and state, on tmpfs")
	set.StringVar(&c.KubeletRoot, "kubelet-root", c.KubeletRoot, "directory below which all targets lie")
	set.StringVar(&c.RuntimeSocket.Path, "runtime-socket", c.RuntimeSocket.Path, "socket of the Runtime API")
	set.StringVar(&c.AdminSocket.Path, "admin-socket", c.AdminSocket.Path, "socket of the Admin API")
	set.StringVar(&c.Containerd.Socket, "containerd-socket", c.Containerd.Socket, "containerd's socket; empty is off")
	set.StringVar(&c.CRI.Socket, "cri-socket", c.CRI.Socket, "CRI-O's socket, where the container runtime is not containerd")
	set.StringVar(&c.Cluster.Kubeconfig, "kubeconfig", "", "how to ask the cluster about this node's pods; empty is off")
	set.StringVar(&c.Cluster.NodeName, "node-name", "", "this node's name in the cluster; empty is the host name")
	set.StringVar(&c.HTTP.Listen, "http-listen", c.HTTP.Listen, "metrics and health: host:port, unix:/path, or empty for off")
	set.BoolVar(&f.abandon, "abandon-volumes", false, "go on although deferred volumes live on this node: also front.abandonVolumes")
	set.StringVar(&c.Log.Level, "log-level", c.Log.Level, "debug, info, warn or error")
	return f
}

// Source says where the configuration comes from.
func (f *Flags) Source() string {
	if f.File == "" {
		return "the defaults and flags alone: no --config is given; the service reads /etc/crust-proxy/config.yaml"
	}
	return f.File + ", with the defaults and flags"
}

// Load gives the configuration that file and flags make, checked.
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
	for name, field := range map[string][2]*string{
		"run-dir":           {&cfg.RunDir, &f.over.RunDir},
		"kubelet-root":      {&cfg.KubeletRoot, &f.over.KubeletRoot},
		"runtime-socket":    {&cfg.RuntimeSocket.Path, &f.over.RuntimeSocket.Path},
		"admin-socket":      {&cfg.AdminSocket.Path, &f.over.AdminSocket.Path},
		"containerd-socket": {&cfg.Containerd.Socket, &f.over.Containerd.Socket},
		"cri-socket":        {&cfg.CRI.Socket, &f.over.CRI.Socket},
		"kubeconfig":        {&cfg.Cluster.Kubeconfig, &f.over.Cluster.Kubeconfig},
		"node-name":         {&cfg.Cluster.NodeName, &f.over.Cluster.NodeName},
		"http-listen":       {&cfg.HTTP.Listen, &f.over.HTTP.Listen},
		"log-level":         {&cfg.Log.Level, &f.over.Log.Level},
	} {
		if f.set.Changed(name) {
			*field[0] = *field[1]
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

// Parse reads YAML over the defaults. Keys that are unknown, or there twice, are
// errors: a misspelt key must not be taken for a default.
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
		return Config{}, named(err)
	}
	return cfg, nil
}
