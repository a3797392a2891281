package config

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestRuntimeClassesOfKata goes over the classes that Kata's installer makes.
func TestRuntimeClassesOfKata(t *testing.T) {
	cfg := check.Value(load(t, "handlers: {crust: {enabled: true}}\npolicy: {rules: [{name: all, defer: true}]}\n"))(t)
	rules := cfg.DeferralPolicy()
	for runtime, want := range map[string]string{
		"kata": "kata", "kata-qemu": "kata", "kata-clh": "kata", "kata-fc": "kata", "kata-dragonball": "kata", "kata-stratovirt": "kata",
		"kata-qemu-runtime-rs": "kata", "kata-cloud-hypervisor": "kata", "kata-qemu-nvidia-gpu": "kata", "kata-qemu-nvidia-gpu-runtime-rs": "kata",
		"kata-qemu-snp": "refused", "kata-qemu-tdx": "refused", "kata-qemu-se": "refused", "kata-qemu-cca": "refused", "kata-qemu-coco-dev": "refused",
		"kata-qemu-snp-runtime-rs": "refused", "kata-qemu-tdx-runtime-rs": "refused", "kata-qemu-se-runtime-rs": "refused",
		"kata-qemu-coco-dev-runtime-rs": "refused", "kata-qemu-nvidia-gpu-snp": "refused", "kata-qemu-nvidia-gpu-tdx": "refused", "kata-remote": "refused",
		"kata-openvmm-azure-runtime-rs": "kata", "kata-clh-azure": "kata", "kata-clh-azure-runtime-rs": "kata", "kata-qemu-nvidia-cpu-runtime-rs": "kata",
		"kata-qemu-nvidia-gpu-snp-runtime-rs": "refused", "kata-qemu-nvidia-gpu-tdx-runtime-rs": "refused",
		"crust": "crust", "crust-crun": "crust", "runc": "", "": "", "my-kata": "",
	} {
		verdict, err := rules.Decide(policy.Input{Driver: "d", RuntimeHandler: runtime, PodKnown: true})
		switch {
		case want == "refused":
			check.That(t, volume.KindOf(err) == volume.Unsupported && strings.Contains(err.Error(), runtime),
				"%s: got handler %q, %v; want a refusal that names it", runtime, verdict.Handler, err)
		case err != nil || verdict.Handler != want:
			t.Errorf("%s: got handler %q, %v; want %q", runtime, verdict.Handler, err, want)
		}
	}
}

func TestRuntimesAreTheAdministrators(t *testing.T) {
	cfg := check.Value(load(t, `
policy:
  runtimes: {kata-qemu-snp: kata, "my-*": kata, kata-old: none}
  rules: [{name: all, defer: true}]
`))(t)
	rules := cfg.DeferralPolicy()
	for runtime, want := range map[string]string{
		"kata-qemu-snp": "kata", "my-vm": "kata", "kata-qemu": "kata",
		"kata-old": "the configuration says so", "kata-qemu-tdx": "confidential", "crust": "handlers.crust.enabled",
	} {
		verdict, err := rules.Decide(policy.Input{Driver: "d", RuntimeHandler: runtime, PodKnown: true})
		check.That(t, verdict.Handler == want || err != nil && strings.Contains(err.Error(), want),
			"%s: got handler %q, %v; want %s", runtime, verdict.Handler, err, want)
	}
}

func TestRulesThatCannotWorkAreRefused(t *testing.T) {
	const crust = "handlers: {crust: {enabled: true}}\n"
	for text, want := range map[string]string{
		"policy: {rules: [{name: a, runtimeHandlers: [crust], defer: true}]}":                        "handlers.crust.enabled is not set",
		crust + "policy: {rules: [{name: a, runtimeHandlers: [crust], handler: kata, defer: true}]}": "belong to the handler crust",
		"policy: {rules: [{name: a, runtimeHandlers: [kata-qemu-snp], defer: true}]}":                "confidential guest",
		"policy: {runtimes: {kata: runc}}":                                                           `policy.runtimes["kata"]`,
		"policy: {runtimes: {\"Kata/x\": kata}}":                                                     `policy.runtimes["Kata/x"]: the key is not a handler`,
	} {
		_, err := load(t, text)
		check.That(t, err != nil && strings.Contains(err.Error(), want), "%s\ngot %v\nwant %s", text, err, want)
	}
	for _, text := range []string{
		crust + "policy: {rules: [{name: a, runtimeHandlers: [crust, kata], defer: true}]}",
		"policy: {rules: [{name: a, runtimeHandlers: [crust, kata], defer: true}]}", // the pods in kata can be served
		"policy: {rules: [{name: a, runtimeHandlers: [crust], defer: false}]}",
		"policy: {rules: [{name: a, runtimeHandlers: [other], defer: true}]}",
	} {
		check.NoError(t, check.Err(load(t, text)), "%s", text)
	}
	cfg := check.Value(load(t, "policy: {rules: [{name: a, runtimeHandlers: [crust, kata], defer: true}]}"))(t)
	lines := cfg.DeferralPolicy().Explain()
	check.That(t, len(lines) == 1 && strings.Contains(lines[0], `"crust"`), "validate explains %q", lines)
}
