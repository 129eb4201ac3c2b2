"""The recipe for Conan 2: `conan create .` builds and packages the library and tests the package."""

from pathlib import Path

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load, rmdir


class Tessera(ConanFile):
    name = "tessera"
    description = "Exact, IO-aware attention for CPUs and NVIDIA GPUs"
    license = "BSD-3-Clause"
    topics = ("attention", "flash-attention", "transformer", "cuda")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "fPIC": [True, False]}
    default_options = {"shared": False, "fPIC": True}
    implements = ["auto_shared_fpic"]
    exports_sources = "CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "kernels/*", "src/*"
    test_package_folder = "tests/install/consumer"

    def set_version(self):
        lists = load(self, Path(self.recipe_folder) / "CMakeLists.txt")
        self.version = lists.partition("project(tessera VERSION ")[2].split()[0]

    def validate(self):
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration(f"os: {self.settings.os}, accepted Linux")
        check_min_cppstd(self, 20)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False
        for part in ("CLI", "TESTS", "EXAMPLES", "BENCH"):
            toolchain.cache_variables[f"TESSERA_BUILD_{part}"] = False
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, Path(self.package_folder) / "licenses")
        for folder in ("lib/cmake", "lib/pkgconfig", "share"):  # Conan writes its own
            rmdir(self, Path(self.package_folder) / folder)

    def package_info(self):
        self.cpp_info.libs = ["tessera"]
        self.cpp_info.system_libs = ["dl", "m", "pthread"]
