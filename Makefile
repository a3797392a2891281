# crust-proxy: `make help` lists the targets; docs/architecture.md explains them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

GO ?= go
# Tools are Go programs pinned by `tool` directives in modules of their own, so
# that their dependencies stay out of the product's go.mod.
TOOL    := $(GO) tool -modfile=tools/go.mod
BUF     := $(TOOL) buf
GOTESTSUM := $(TOOL) gotestsum
GOLANGCI  := $(GO) tool -modfile=tools/golangci-lint/go.mod golangci-lint

UNIT_TIMEOUT   ?= 10m
SYSTEM_TIMEOUT ?= 25m
VM_TIMEOUT     ?= 45m
KUBE_TIMEOUT   ?= 40m
NODE_TIMEOUT   ?= 45m
# Which tests of test/node run, and which of those do not.
NODE_TESTS     ?= .
NODE_SKIP      ?=
PACKAGE_TIMEOUT ?= 45m
# Tests beside those of test/vm that boot virtual machines.
IN_VMS         ?= ^Test(CrustVM|CountInAGuest)$$
# What is repeated on an older Kubernetes: 1.36, and in a soak on 1.34.
KUBE_OLDER     ?= ^Test(ShapesOfPods|PodsThatShareAVolume|QuickStart|ManifestsAreAccepted|ChartComesAndGoes|AnnotatedByClass)$$
FUZZTIME       ?= 3s

IN_VM := $(GOTESTSUM) --format testname -- -tags system,failpoints -count=1 -timeout $(VM_TIMEOUT)
IN_KUBE := $(GOTESTSUM) --format testname -- -tags system,failpoints -count=1 -p 2 -timeout $(KUBE_TIMEOUT)

.PHONY: help
help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build static binaries into bin/
	@GO="$(GO)" hack/build.sh bin
	@GO="$(GO)" hack/notice.sh >bin/NOTICE

.PHONY: demo
demo: ## Show one volume's whole way on this machine (root)
	@GO="$(GO)" hack/demo.sh

.PHONY: demo-pod
demo-pod: ## Show one volume's whole way into a pod of containerd and crust-runc (root)
	@GO="$(GO)" hack/demo.sh pod

.PHONY: demo-vm
demo-vm: ## Show one volume's whole way into a virtual machine (root)
	@GO="$(GO)" hack/demo.sh vm

.PHONY: bench
bench: setup build ## Measure against the targets; writes docs/performance.md (root)
	$(GO) run ./test/bench

.PHONY: check-ratios
check-ratios: setup build ## Fail where a ratio misses its goal by far, three times in turn (root)
	$(GO) run ./test/bench --check

.PHONY: bench-vm
bench-vm: setup build ## Measure pods in virtual machines; writes docs/performance.md (root)
	$(GO) run ./test/bench --only vm

.PHONY: test
test: ## Run all tests and checks; installs what they need on Debian and Ubuntu
	@hack/test.sh

.PHONY: soak
soak: ## The long forms: all rounds and cases, Kubernetes 1.34, long fuzzing; takes hours (root)
	CRUST_SOAK=1 FUZZTIME=5m UNIT_TIMEOUT=1h SYSTEM_TIMEOUT=3h VM_TIMEOUT=3h KUBE_TIMEOUT=3h hack/test.sh
	@hack/mutants.sh
	@hack/mutation.sh

.PHONY: setup
setup: ## Install the Debian packages that tests need (only missing ones)
	@hack/setup.sh

.PHONY: unit
unit: ## Unit tests with the race detector
	$(GOTESTSUM) --format pkgname-and-test-fails --format-hide-empty-pkg -- -race -timeout $(UNIT_TIMEOUT) ./...

# Of what no test calls openat2, which QEMU of Debian 12 does not know, or runs programs that it built.
ARM64_UNIT := ./pkg/csidefer ./pkg/runtime ./pkg/runtime/sandbox ./pkg/runtime/internal/... ./pkg/stats ./pkg/volume/... \
	./internal/daemon/config ./internal/disk/... ./internal/front/csi/decision ./internal/front/policy ./internal/ground/capture \
	./internal/ground/openers ./internal/ground/rpccode ./internal/ground/run ./internal/ground/size ./internal/ground/sys \
	./internal/backup ./reference/vm/initramfs ./reference/vm/wire

.PHONY: test-arm64
test-arm64: ## Unit tests of arm64, whose instructions QEMU emulates; all tests have to compile
	GOARCH=arm64 CGO_ENABLED=0 $(GO) vet -tags system,failpoints ./...
	@# QEMU has a lock over munmap, which hangs in the first one that is left out, and no preadv2 for the other.
	$(GOTESTSUM) --format pkgname-and-test-fails --format-hide-empty-pkg --raw-command -- \
		env GOARCH=arm64 CGO_ENABLED=0 $(GO) test -json -timeout $(UNIT_TIMEOUT) -skip '^(TestCloseThatHangs|TestOnlyTheDiskCounts)$$' -exec qemu-aarch64-static $(ARM64_UNIT)

.PHONY: system
system: ## Tests on the real kernel: mounts, loop devices, faults (root)
	@hack/need-root.sh "system tests"
	@hack/setup.sh browser
	$(GOTESTSUM) --format pkgname-and-test-fails --format-hide-empty-pkg -- -tags system,failpoints -count=1 -p 1 -parallel 4 -timeout $(SYSTEM_TIMEOUT) -skip '$(IN_VMS)' $$(hack/system-packages.sh)

.PHONY: test-vm
test-vm: ## Tests of crust-vm: pods in virtual machines of QEMU (root)
	@hack/need-root.sh "tests in virtual machines"
	@hack/containerd.sh >/dev/null && hack/guest-kernel.sh >/dev/null
	@# One machine at a time: other tests may run beside it.
	result=0; $(IN_VM) ./test/vm || result=$$?; $(IN_VM) -p 1 -run '$(IN_VMS)' ./test/conformance ./test/openers && exit $$result
	[ "$${CRUST_SOAK:-}" != 1 ] || $(GO) run ./test/bench --only vm --quick

.PHONY: test-node
test-node: ## Tests of the packages on Debian nodes, machines with systemd and cgroup v2, one in Kubernetes (root)
	@hack/need-root.sh "tests on a node"
	@hack/containerd.sh >/dev/null && hack/guest-kernel.sh >/dev/null
	$(GOTESTSUM) --format testname -- -tags system -count=1 -timeout $(NODE_TIMEOUT) -run '$(NODE_TESTS)' -skip '$(NODE_SKIP)' ./test/node

.PHONY: test-kube
test-kube: ## Tests in a real Kubernetes node, whose programs are built first (root)
	@hack/need-root.sh "tests in Kubernetes"
	@hack/kubernetes.sh kubernetes kubernetes-1.36 csi-sidecars >/dev/null && hack/containerd.sh >/dev/null && hack/guest-kernel.sh >/dev/null
	@for tool in helm kustomize; do $(GO) tool -n -modfile=tools/kube-deploy/go.mod $$tool >/dev/null; done
	$(IN_KUBE) ./test/kube/...
	for older in 1.36 $(if $(filter 1,$(CRUST_SOAK)),1.34); do CRUST_KUBERNETES=$$older $(IN_KUBE) -run '$(KUBE_OLDER)' ./test/kube ./test/kube/admission; done

.PHONY: package-test
package-test: ## Build the packages; install, check and remove the .deb (root)
	@hack/need-root.sh "the package test"
	@hack/containerd.sh >/dev/null
	$(GOTESTSUM) --format testname -- -tags system -count=1 -timeout $(PACKAGE_TIMEOUT) ./test/package/...

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME (3s)
	@FUZZTIME=$(FUZZTIME) hack/fuzz.sh

.PHONY: mutants
mutants: ## Bring back past defects one at a time: a unit test has to find each
	@hack/mutants.sh

.PHONY: mutation
mutation: ## Change one operator at a time where it counts: how many changes do unit tests find? (half an hour)
	@hack/mutation.sh

.PHONY: lint
lint: ## golangci-lint, buf lint, and the rules of hack/structure
	$(GO) run ./hack/structure
	$(GOLANGCI) run --timeout 40m
	$(BUF) lint

.PHONY: walk
walk: setup ## Count the functions, files and packages that one call runs through (root)
	@hack/need-root.sh "the walk"
	@$(GO) run ./test/walk

.PHONY: fmt
fmt: ## Format Go code as lint wants it
	$(GOLANGCI) fmt

.PHONY: generate
generate: ## Regenerate the Go code of the protos
	$(BUF) generate proto
	$(BUF) generate reference/vm/wire --template reference/vm/wire/buf.gen.yaml

.PHONY: check-generated
check-generated: ## Check that generated code and go.mod match their sources
	@hack/check-generated.sh

.PHONY: check-breaking
check-breaking: ## Check the protos against their earlier version
	@hack/check-breaking.sh

.PHONY: check-systemd
check-systemd: ## Verify the units and their exposure
	@hack/check-systemd.sh

.PHONY: check-deploy
check-deploy: ## Lint and render chart and kustomizations, and check what comes out
	@hack/check-deploy.sh

.PHONY: deploy
deploy: ## Render the kustomizations into dist/kustomize
	@hack/kustomize.sh dist/kustomize

.PHONY: check-monitoring
check-monitoring: ## Try alerts and dashboard with Prometheus' own parser and rule engine
	@hack/check-monitoring.sh

.PHONY: package
package: ## Build dist/*.deb and dist/*.rpm
	@hack/package.sh dist

.PHONY: image
image: ## Build the images for amd64 and arm64 into dist/image, an OCI layout
	@for arch in amd64 arm64; do GO="$(GO)" GOARCH=$$arch hack/build.sh dist/programs/$$arch; done
	@GO="$(GO)" hack/notice.sh >dist/programs/NOTICE
	@hack/image.sh dist/image dev dist/programs >dist/image-packages.txt

.PHONY: release
release: ## Make all files of a release of HEAD into dist/VERSION: make release VERSION=v1.2.3
	@GO="$(GO)" hack/release.sh "$(VERSION)"

.PHONY: check-release
check-release: ## Make a release twice, compare, verify signatures and versions
	@GO="$(GO)" hack/check-release.sh

.PHONY: clean
clean: ## Remove what was built
	rm -rf bin dist
